"""Limits on clients: keys, hosts, origins, and the size of a request."""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.fields import parsed, shown

_T = TypeVar("_T")

_LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Pattern of origins that are always allowed: pages from this machine may send requests."""

_SMALL = 2**16
"""Maximum number of bytes of a body that the main thread parses and checks."""


@dataclass(slots=True)
class Limits:
    """Limits on clients.

    Attributes
    ----------
    keys
        API keys. Each request must have one of these keys. Empty if requests need no key.
    names
        Host names that requests may have, in lower case. IP addresses are always allowed. None allows all
        names.
    origins
        Origins of web pages and apps that may send requests. Pages from this machine are always allowed. "*"
        allows all origins.
    max_bytes
        Maximum number of bytes of a body.
    read_timeout
        Maximum time until a body has arrived, in seconds.
    """

    keys: tuple[str, ...] = ()
    names: frozenset[str] | None = None
    origins: tuple[str, ...] = ()
    max_bytes: int = 64 * 2**20
    read_timeout: float = 30.0

    def allows(self, origin: str) -> bool:
        """True if a page from this origin may send requests to a server that needs no keys."""
        return bool("*" in self.origins or origin in self.origins or re.fullmatch(_LOCAL, origin))


class _Cors(CORSMiddleware):
    """Tells browsers which pages may read answers.

    If a page is not allowed, the response to the browser's preflight request is an error that names the
    page's origin.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        is_asked = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if not origin or not is_asked or self.is_allowed_origin(origin):
            await super().__call__(scope, receive, send)
            return
        error = _wrong_origin(origin)
        # store the error for the log
        scope.setdefault("state", {})["error"] = error
        await JSONResponse(error.body, error.status)(scope, receive, send)


def cors(limits: Limits) -> Middleware:
    """Return the middleware for web pages."""
    return Middleware(
        _Cors,
        allow_origins=limits.origins,
        allow_origin_regex=_LOCAL,
        allow_methods=["*"],
        allow_headers=["*"],
        # before a page of the internet connects to this machine, browsers ask the server for permission
        allow_private_network=bool(limits.origins),
    )


def check_key(limits: Limits, http: Request) -> None:
    """Raise ApiError if keys are needed and a request does not have one of the keys."""
    if not limits.keys:
        return
    scheme, _, bearer = http.headers.get("authorization", "").partition(" ")
    key = bearer.strip(" \t") if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")
    # headers are decoded as Latin-1, but most clients send UTF-8
    given = key.encode("latin-1"), key.encode()
    # compare with all keys, so that the time for the comparison says nothing about the keys
    if not sum(hmac.compare_digest(each, key.encode()) for key in limits.keys for each in given):
        raise ApiError(
            "the API key is wrong or missing", status=401, kind="authentication_error", code="invalid_api_key"
        )


def check_host(limits: Limits, http: Request) -> None:
    """Raise ApiError if a request comes from a foreign web page and no key is needed.

    CORS does not prevent such requests, because browsers send a request even if the page may not read the
    answer.

    Also raise ApiError if the host name in the request is not in `names`: a web page can let its own host
    name resolve to this machine's address (DNS rebinding). An IP address cannot be used in this way. A
    request without a host (HTTP/1.0) is not from a browser.
    """
    host = http.headers.get("host", "")
    origin = http.headers.get("origin")
    is_own = origin in (f"http://{host}", f"https://{host}")
    if origin and not limits.keys and not (is_own or limits.allows(origin)):
        raise _wrong_origin(origin)
    if limits.names is None or not host:
        return
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if name not in limits.names and not _is_address(name):
        raise ApiError(
            f"this server does not answer as {shown(host)}; use its IP address, or --api-key-file",
            status=403,
            code="wrong_host",
        )


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def own_names(host: str, *, is_local: bool) -> frozenset[str]:
    """Return the names for `Limits.names` of a server that needs no key. This does not use DNS.

    host: the value of --host. is_local: True if only programs on this machine can reach the server.
    """
    names = {"localhost", host.lower()}
    if not is_local:
        name = socket.gethostname().lower()
        for own in (name, name.partition(".")[0]):
            names |= {own, f"{own}.local"}
    return frozenset(names)


def _wrong_origin(origin: str) -> ApiError:
    return ApiError(
        f"pages of {shown(origin)} are refused; kvtool serve --allow-origin {shown(origin)} allows them",
        status=403,
        code="wrong_origin",
    )


def client(http: Request) -> str:
    """Return an id of the client. With these ids, the queue lets clients take turns."""
    names = ("authorization", "x-api-key", "x-session-id")
    id = next(filter(None, map(http.headers.get, names)), None)
    return id or (http.client.host if http.client else "")


async def checked(limits: Limits, http: Request, check: Callable[[Any], _T]) -> _T:
    """Return the result of `check`, which is called with the JSON of a request. Raises ApiError.

    A long body is parsed and checked in another thread.
    """
    encoding = http.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            f"the body has the encoding {shown(encoding)}; send it plain",
            status=415,
            code="unsupported_encoding",
        )
    if int(http.headers.get("content-length", 0)) > limits.max_bytes:
        # answer before the body arrives, also if the client waits for permission (Expect: 100-continue)
        raise _too_large(limits)
    try:
        data = await asyncio.wait_for(_bytes(limits, http), limits.read_timeout)
    except asyncio.TimeoutError:
        raise ApiError("the body took too long to arrive", status=408, code="timeout") from None
    if len(data) <= _SMALL:
        return check(parsed(data))
    return await asyncio.to_thread(lambda: check(parsed(data)))


async def _bytes(limits: Limits, http: Request) -> bytes:
    parts, n = [], 0
    async for part in http.stream():
        n += len(part)
        if n > limits.max_bytes:
            raise _too_large(limits)
        parts.append(part)
    return b"".join(parts)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(f"the body has more than {limits.max_bytes} bytes", status=413, code="body_too_large")
