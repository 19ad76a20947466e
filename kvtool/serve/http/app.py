"""The routes of the server, and the answers that they send. They never wait while an engine computes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvtool.llama.loaded.model import Model
from kvtool.serve import queue
from kvtool.serve.api import anthropic, requests, responses
from kvtool.serve.api.anthropic import AnthropicBodies
from kvtool.serve.api.completions import AnswerBodies, Body, CompletionBodies
from kvtool.serve.api.errors import ApiError, internal_error
from kvtool.serve.api.fields import Fields, shown, wrong
from kvtool.serve.api.requests import ChatRequest, Defaults, GivenChat, Request
from kvtool.serve.api.responses import ResponseBodies
from kvtool.serve.events import End, Event
from kvtool.serve.http import gate, metrics, page
from kvtool.serve.http.access import AccessLog
from kvtool.serve.http.gate import Limits
from kvtool.serve.http.metrics import Counts
from kvtool.serve.pool import SlotPool
from kvtool.serve.queue import Job, JobQueue, stopped
from kvtool.serve.slot import Slot, text_of

_T = TypeVar("_T")

Handler = Callable[["Site", HttpRequest], Awaitable[Response]]

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}
"""Additional headers of error responses, by status."""

_N_THREAD = 4
"""Maximum number of functions that use the model's tokenizer at the same time."""

PING_S = 5.0
"""A stream sends a ping if it has sent nothing for this many seconds."""


@dataclass(slots=True)
class Site:
    """State that all routes use.

    Attributes
    ----------
    pool
        The slots. None until the model is loaded.
    created
        Time of the last change of the model's file, in seconds since 1970. 0 until the model is loaded.
    has_metrics
        True if the server has the route /metrics, which reports `counts`.
    log
        Called with a line about each request. None if there is no log.
    say
        Called with a line for the person who runs the server.
    threads
        Threads that use the model's tokenizer, so that long texts do not block the event loop.
    stopping
        Set when the server stops. Requests whose answers have not begun then get an error.
    """

    model: str
    policy: str
    jobs: JobQueue
    defaults: Defaults = field(default_factory=Defaults)
    limits: Limits = field(default_factory=Limits)
    pool: SlotPool | None = None
    created: int = 0
    has_metrics: bool = False
    counts: Counts = field(default_factory=Counts)
    log: Callable[[str], None] | None = None
    say: Callable[[str], None] = lambda line: None
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_N_THREAD, "tokenizer"))
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _unsaved_cause: str = ""

    def start(self, pool: SlotPool) -> None:
        """Begin to answer requests, because the model is loaded."""
        self.created = int(pool.slots[0].model.path.stat().st_mtime)
        self.pool = pool

    def add_answer(self, end: End) -> None:
        """Count an answer, and say if its chat could not be stored, once for each cause in a row."""
        self.counts.add(end)
        reason = end["kvtool"].get("unsaved", "")
        # the beginning of the reason has the name of the chat's file, which changes
        cause = reason.rpartition(": ")[2]
        if cause and cause != self._unsaved_cause:
            self.say(f"chats are not stored: {reason}")
        self._unsaved_cause = cause


def make(site: Site) -> Starlette:
    def route(path: str, handler: Handler, method: str = "GET", is_open: bool = False) -> Route:
        # count only requests for text, because health checks would outnumber them
        is_counted = handler in (_chat_completions, _completions, _responses, _messages)

        async def endpoint(request: HttpRequest) -> Response:
            request.state.id = f"req_{secrets.token_hex(12)}"
            try:
                # /health has no secret, and programs that check whether a server is alive use any host name
                if handler is not _health:
                    gate.check_host(site.limits, request)
                if not is_open:
                    gate.check_key(site.limits, request)
                if method == "POST":
                    _ready(site)
                answer = await _unless(site.stopping.wait(), stopped(), handler(site, request))
                answer.headers.update(_ids(request.state.id))
                return answer
            except ClientDisconnect:
                site.counts.abandoned += is_counted
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001
                site.counts.refused += is_counted
                # handle a bug here, so that the log and the metrics show its answer
                return _failed(request, error if isinstance(error, ApiError) else internal_error(error))

        return Route(path, endpoint, methods=[method])

    routes = [
        # the page needs no key, because it asks the user for the key
        route("/", _page, is_open=True),
        route("/v1/chat/completions", _chat_completions, "POST"),
        route("/v1/completions", _completions, "POST"),
        route("/v1/responses", _responses, "POST"),
        route("/v1/responses/input_tokens", _count_response, "POST"),
        route("/v1/messages", _messages, "POST"),
        route("/v1/messages/count_tokens", _count_message, "POST"),
        route("/v1/models", _models),
        route("/v1/models/{name:path}", _model),
        route("/props", _props),
        route("/tokenize", _tokenize, "POST"),
        route("/detokenize", _detokenize, "POST"),
        # if this address exists, lm-evaluation-harness lets the server tokenize
        route("/tokenizer_info", _props),
        # /health needs no key, because programs that check whether a server is alive have no key
        route("/health", _health, is_open=True),
    ]
    if site.has_metrics:
        routes.append(route("/metrics", _metrics))
    middleware = [gate.cors(site.limits)]
    if site.log:
        middleware.insert(0, Middleware(AccessLog, say=site.log))
    no_route = partial(_no_route, {each.path for each in routes})
    handlers: dict[Any, Any] = {404: no_route, 405: no_route, Exception: _internal_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    # do not redirect, because a redirect would lead to any host that the client has named
    app.router.redirect_slashes = False
    return app


# answers


async def _chat_completions(site: Site, http: HttpRequest) -> Response:
    request = await gate.checked(
        site.limits, http, lambda body: _chat_request(site, http, requests.as_chat(body))
    )
    bodies = CompletionBodies("chat", site.model, site.policy, with_usage=request.with_usage)
    return await _answer(site, http, request, bodies)


async def _completions(site: Site, http: HttpRequest) -> Response:
    request = await gate.checked(site.limits, http, lambda body: requests.check_text(body, site.defaults))
    bodies = CompletionBodies("text", site.model, site.policy, with_usage=request.with_usage)
    return await _answer(site, http, request, bodies)


async def _responses(site: Site, http: HttpRequest) -> Response:
    def check(body: Any) -> tuple[ChatRequest, AnswerBodies]:
        request = _chat_request(site, http, responses.as_chat(body))
        return request, ResponseBodies(site.model, site.policy, body)

    return await _answer(site, http, *await gate.checked(site.limits, http, check))


async def _messages(site: Site, http: HttpRequest) -> Response:
    def check(body: Any) -> tuple[ChatRequest, AnswerBodies]:
        request = _chat_request(site, http, anthropic.as_chat(body))
        return request, AnthropicBodies(site.model, site.policy, body, http.state.id)

    return await _answer(site, http, *await gate.checked(site.limits, http, check))


async def _count_response(site: Site, http: HttpRequest) -> Response:
    def check(body: Any) -> ChatRequest:
        return _chat_request(site, http, responses.as_chat(body))

    n = await _counted(site, http, await gate.checked(site.limits, http, check))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": n})


async def _count_message(site: Site, http: HttpRequest) -> Response:
    def check(body: Any) -> ChatRequest:
        return _chat_request(site, http, anthropic.as_chat(body, is_counted=True))

    n = await _counted(site, http, await gate.checked(site.limits, http, check))
    return JSONResponse({"input_tokens": n})


async def _counted(site: Site, http: HttpRequest, request: ChatRequest) -> int:
    return await _in_thread(site, http, _ready(site).slots[0].count, request)


def _chat_request(site: Site, http: HttpRequest, given: GivenChat) -> ChatRequest:
    return requests.check_chat(given, site.defaults, http.headers.get("x-session-id"))


async def _answer(site: Site, http: HttpRequest, request: Request, bodies: AnswerBodies) -> Response:
    job = http.state.job = Job(request, gate.client(http))
    site.jobs.put(job, is_prepared=False)
    try:
        _start(site, _prepare, site, _ready(site).slots[0], job)
        if request.stream:
            # wait for the first event: if it is an error, its status becomes the HTTP status
            skipped = () if request.with_progress else ("reading",)
            first = await _unless_gone(http, _next_event(job, skipped))
            if first and first["kind"] == "error":
                raise first["error"]
            return _Streamed(job, _stream(site, job, request, bodies, first), site.counts)
        return await _unless_gone(http, _complete(site, job, request, bodies))
    except BaseException:
        job.cancel()
        raise


def _prepare(site: Site, slot: Slot, job: Job) -> None:
    """Render and tokenize the prompt of a waiting job. If this fails, the job ends with the error."""
    if not job.is_cancelled:
        queue.answer(job, slot.prepare)
    if job.prompt is None:
        job.cancel()
    site.jobs.prepared(job)


async def _next_event(job: Job, skipped: tuple[str, ...]) -> Event | None:
    """Return the next event whose kind is not in `skipped`; None if a ping is due before this event."""
    try:
        return await asyncio.wait_for(job.next_event(*skipped), PING_S)
    except asyncio.TimeoutError:
        return None


class _Streamed(StreamingResponse):
    """A response that cancels its job when it ends, even if the client left before the first line.

    counts: counts the request if the client leaves before the end.
    """

    def __init__(self, job: Job, lines: AsyncIterator[str], counts: Counts) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._job, self._counts = job, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()
            if not (self._job.end or self._job.error):
                self._counts.abandoned += 1


async def _complete(site: Site, job: Job, request: Request, bodies: AnswerBodies) -> Response:
    """Return an answer that is not streamed."""
    logprobs: list[Body] | None = None if request.logprobs is None else []
    while True:
        event = await job.next_event()
        if event["kind"] == "error":
            raise event["error"]
        if event["kind"] == "piece" and logprobs is not None:
            logprobs += event["logprobs"]
        if event["kind"] == "end":
            job.end = event
            site.add_answer(event)
            return JSONResponse(bodies.whole(logprobs, event))


async def _stream(
    site: Site, job: Job, request: Request, bodies: AnswerBodies, first: Event | None
) -> AsyncIterator[str]:
    """Yield the lines of an answer that is streamed. first: the first event, or None to begin with a ping."""
    skipped = ("read",) if request.with_progress else ("reading", "read")
    lines = bodies.first()
    # log-probabilities of tokens whose text has not been sent yet; None if none were requested
    logprobs: list[Body] | None = None if request.logprobs is None else []
    event, sent_at = first, time.monotonic()
    while True:
        lines += bodies.prompt_known(job.prompt_counts)
        if event is None:
            lines.append(bodies.ping())
        elif event["kind"] == "reading":
            lines += bodies.progress(job.prompt_counts, event)
        elif event["kind"] == "piece":
            if logprobs is not None:
                logprobs += event["logprobs"]
            for delta in event["deltas"]:
                lines += bodies.piece(delta, logprobs)
                logprobs = None if logprobs is None else []
        elif event["kind"] == "error":
            job.error = event["error"]
            site.counts.refused += 1
            lines += bodies.failed(event["error"])
        elif event["kind"] == "end":
            job.end = event
            site.add_answer(event)
            lines += bodies.last(logprobs, event)
        # the beginning of a tool call may be held back for a long time, so send a ping
        if not lines and time.monotonic() - sent_at > PING_S:
            lines.append(bodies.ping())
        for line in lines:
            sent_at = time.monotonic()
            yield line
        if event and event["kind"] in ("end", "error"):
            return
        lines, event = [], await _next_event(job, skipped)


# other routes


async def _page(site: Site, http: HttpRequest) -> Response:
    return page.response()


async def _models(site: Site, http: HttpRequest) -> Response:
    page = {"has_more": False, "first_id": site.model, "last_id": site.model}
    return JSONResponse({"object": "list", "data": [_model_body(site)], **page})


async def _model(site: Site, http: HttpRequest) -> Response:
    return JSONResponse(_model_body(site))


def _model_body(site: Site) -> Body:
    meta: Body = {}
    if site.pool:
        slot = site.pool.slots[0]
        # Anthropic's clients read max_input_tokens
        meta = {"max_input_tokens": slot.engine.n_ctx, "meta": _model_meta(slot.model)}
    created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(site.created))
    openai = {"id": site.model, "object": "model", "created": site.created, "owned_by": "kvtool"}
    anthropic = {"type": "model", "display_name": site.model, "created_at": created_at}
    return openai | anthropic | {"lifecycle": "active"} | meta


def _model_meta(model: Model) -> Body:
    return {"n_ctx_train": model.n_ctx_train, "n_vocab": model.n_vocab}


async def _props(site: Site, http: HttpRequest) -> Response:
    pool = _ready(site)
    slot = pool.slots[0]
    engine, model, template = slot.engine, slot.model, slot.template
    return JSONResponse(
        {
            "model_path": str(model.path),
            "model_alias": site.model,
            "chat_template": template.source if template else "",
            "bos_token": text_of(model, [model.bos]) if model.bos >= 0 else None,
            "eos_token": text_of(model, [model.eos]) if model.eos >= 0 else None,
            "default_generation_settings": {"n_ctx": engine.n_ctx},
            "policy": site.policy,
            "budget": engine.policy.budget,
            "asked": engine.policy.n_asked,
            "n_stored": len(slot.chats),
            "model_meta": _model_meta(model),
            "total_slots": pool.n_max,
            "n_caches": len(pool.slots),
            "cache_bytes": pool.cache_bytes,
        }
    )


async def _metrics(site: Site, http: HttpRequest) -> Response:
    jobs, stored, cache_bytes = site.jobs, (0, 0), 0
    if pool := site.pool:
        chats, cache_bytes = pool.slots[0].chats, pool.cache_bytes
        stored = len(chats) + len(chats.others), chats.n_bytes
    text = metrics.text(site.counts, len(jobs.running), len(jobs), stored, cache_bytes)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _health(site: Site, http: HttpRequest) -> Response:
    return JSONResponse({"status": "ok"}) if site.pool else _failed(http, _loading())


async def _tokenize(site: Site, http: HttpRequest) -> Response:
    fields = await gate.checked(site.limits, http, Fields)
    # vLLM uses the names "prompt" and "add_special_tokens"
    content = next((text for text in map(fields.text, ("content", "prompt")) if text is not None), None)
    if content is None:
        raise wrong("content", "a string", content)
    adds_special = fields.flag("add_special") or fields.flag("add_special_tokens")
    parses_special = fields.flag("parse_special", True)
    model = _ready(site).slots[0].model

    tokenize = partial(model.tokenize, content, special=parses_special, start=adds_special)
    tokens = await _in_thread(site, http, tokenize)
    return JSONResponse({"tokens": tokens.tolist()})


async def _detokenize(site: Site, http: HttpRequest) -> Response:
    def check(body: Any) -> list[int]:
        tokens = Fields(body).pop("tokens")
        if not isinstance(tokens, list) or not all(type(each) is int for each in tokens):
            raise ApiError.at("tokens", "must be a list of whole numbers")
        return tokens

    tokens, model = await gate.checked(site.limits, http, check), _ready(site).slots[0].model
    if any(not 0 <= token < model.n_vocab for token in tokens):
        raise ApiError(f"tokens must be in 0..{model.n_vocab - 1}", param="tokens")
    text = await _in_thread(site, http, text_of, model, tokens)
    return JSONResponse({"content": text, "prompt": text})


def _ready(site: Site) -> SlotPool:
    """Return the slots. Raises ApiError until the model is loaded."""
    if not site.pool:
        raise _loading()
    return site.pool


def _loading() -> ApiError:
    return ApiError("the model is being loaded", status=503, kind="unavailable_error", code="loading")


async def _in_thread(site: Site, http: HttpRequest, function: Callable[..., _T], *values: Any) -> _T:
    """Return the result of a function that uses the model. It may never run if the client leaves."""
    try:
        return await _unless_gone(http, _start(site, function, *values))
    except asyncio.CancelledError:
        # the server has cancelled work that has not begun
        raise stopped() from None


def _start(site: Site, function: Callable[..., _T], *values: Any) -> asyncio.Future[_T]:
    """Call a function in one of the threads that use the model. Return its future result."""
    try:
        return asyncio.get_running_loop().run_in_executor(site.threads, function, *values)
    except RuntimeError:
        # the threads take no more work, because the server stops
        raise stopped() from None


async def _unless_gone(http: HttpRequest, result: Awaitable[_T]) -> _T:
    """Return the awaited result. Raises ClientDisconnect as soon as the client has left."""
    return await _unless(_gone(http), ClientDisconnect(), result)


async def _unless(event: Awaitable[object], error: Exception, result: Awaitable[_T]) -> _T:
    """Await `result` and return it. If `event` completes first, cancel `result` and raise `error`."""
    waited, happened = asyncio.ensure_future(result), asyncio.ensure_future(event)
    try:
        await asyncio.wait({waited, happened}, return_when=asyncio.FIRST_COMPLETED)
        if waited.done():
            return waited.result()
        raise error
    finally:
        for task in (waited, happened):
            task.cancel()
            # a cancelled task may still fail, for example because its client leaves now. Retrieve its
            # error, because asyncio prints errors that nobody retrieves
            task.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _failed(http: HttpRequest, error: ApiError) -> Response:
    """Return the error response of the API that the client uses."""
    # store the error for the log
    http.state.error = error
    id = getattr(http.state, "id", "") or f"req_{secrets.token_hex(12)}"
    headers = _HEADERS.get(error.status, {}) | _ids(id)
    if not (http.url.path.startswith("/v1/messages") or "anthropic-version" in http.headers):
        return JSONResponse(error.body, error.status, headers)
    return JSONResponse(anthropic.error_body(error, id), anthropic.status_of(error), headers)


def _ids(id: str) -> dict[str, str]:
    """Return the headers that hold a request's id: one for Anthropic's clients, one for OpenAI's."""
    return {"request-id": id, "x-request-id": id}


async def _internal_error(http: HttpRequest, error: Exception) -> Response:
    """Print a bug that occurs while an answer is sent."""
    return JSONResponse(internal_error(error).body, 500)


async def _no_route(paths: Collection[str], http: HttpRequest, error: Any) -> Response:
    """Return the error response for an unknown address, or for a wrong method. paths: the known addresses."""
    path = shown(http.url.path)
    if error.status_code == 405:
        fault, code = f"{shown(http.method)} is not for this address: {path}", "method_not_allowed"
    else:
        fault, code = f"no such address: {path}; {_hint(http.url.path, paths)}", "not_found"
    answer = _failed(http, ApiError(fault, status=error.status_code, code=code))
    # add starlette's headers, which list the allowed methods
    answer.headers.update(error.headers or {})
    return answer


def _hint(path: str, paths: Collection[str]) -> str:
    """Return advice for an unknown address. Often /v1 is missing or repeated, or it ends with a slash."""
    name = path.rstrip("/").rpartition("/v1/")[2].lstrip("/")
    similar = (f"/v1/{name}", f"/{name}", f"/v1/{name}s")
    if near := next((each for each in similar if name and each in paths), None):
        return f"did you mean {near}?"
    if name.startswith(("embedding", "rerank")):
        return "embeddings and reranking are not supported"
    if name == "metrics":
        return "start the server with --metrics"
    return "chats go to /v1/chat/completions, /v1/responses or /v1/messages, texts to /v1/completions"
