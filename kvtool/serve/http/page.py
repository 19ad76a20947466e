"""The chat page at /. It is a single HTML file and does not load other files."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse, Response

_POLICY = {
    "default-src": "'none'",
    "connect-src": "'self'",
    "img-src": "data:",
    **dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'"),
}


def response() -> Response:
    """Return the page. Its headers allow it to run only its own script and to connect only to its server."""
    text, policy = _read()
    return HTMLResponse(
        text,
        headers={
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            # do not let browsers cache the page, because it changes when kvtool is updated
            "Cache-Control": "no-cache",
        },
    )


@cache
def _read() -> tuple[str, str]:
    """Return the page and its Content-Security-Policy, which has the digests of its script and style."""
    folder = files("kvtool.serve.http").joinpath("web")

    def read(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    text = re.sub(r"\{\{(\S+)\}\}", lambda match: read(match[1]), read("page.html"))
    policy = _POLICY | {f"{tag}-src": _digests(text, tag) for tag in ("script", "style")}
    return text, "; ".join(f"{name} {value}" for name, value in policy.items())


def _digests(text: str, tag: str) -> str:
    inside = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.S)
    digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in inside)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
