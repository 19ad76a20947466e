"""kvtool serve in the test's own process and without a socket, with or without an engine."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import httpx2 as httpx

from kvtool.cli import serve
from kvtool.config.run import ChatOptions
from kvtool.serve.api.requests import Defaults
from kvtool.serve.http import app
from kvtool.serve.http.app import Site
from kvtool.serve.queue import JobQueue
from tests.blocking_policy import TIMEOUT_S

_MODEL = SimpleNamespace(n_ctx_train=64, n_vocab=8)
_ENGINE = SimpleNamespace(n_ctx=48)


class InProcessServer:
    """A server that is ready.

    site: the state that its routes share.
    pool: its slots.
    """

    def __init__(self, site, pool):
        self.site, self.pool = site, pool
        self._app = app.make(site)
        # all requests use the same loop, because the engine's threads send events to it until the server ends
        self._loop = asyncio.new_event_loop()

    def ask(self, path, body=None, method="POST", **options):
        """Return the complete answer to one request. options: arguments of httpx's `request`."""

        async def get_answer():
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=None
            ) as client:
                return await client.request(method, path, json=body, **options)

        return self.run(get_answer())

    def run(self, awaitable):
        return self._loop.run_until_complete(awaitable)

    def close(self):
        """Close the event loop of the requests. Call this only after the engine has ended."""
        self._loop.close()

    def chat(self, messages, **more):
        """Return (message, usage) of the answer to these messages."""
        answer = self.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 6, **more})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        return body["choices"][0]["message"], body["usage"]


def prepare(job):
    """Stand for `Slot.prepare`."""
    job.prompt = ()


def send(
    path,
    method="GET",
    *,
    body=None,
    content=None,
    headers=(),
    engine=None,
    n_waiting=1,
    is_loaded=True,
    count=None,
    model=_MODEL,
    **site,
):
    """Return the answer to one request to a server without a model.

    body: the request's body as an object, which is sent as JSON.
    content: the request's body as bytes.
    engine: function that answers the job in its own thread. None if no job is expected.
    n_waiting: number of jobs for which the queue has room.
    is_loaded: False if the model is still being loaded.
    count: function that returns the number of tokens of a chat's prompt.
    model: stands for the model.
    site: further fields of `Site`.
    """
    waiting = JobQueue(n_waiting)
    slot = SimpleNamespace(count=count, prepare=prepare, model=model, engine=_ENGINE)
    pool = SimpleNamespace(slots=[slot]) if is_loaded else None
    asgi_app = app.make(Site("m", "h2o", waiting, pool=pool, **site))

    async def get_answer():
        transport = httpx.ASGITransport(asgi_app, raise_app_exceptions=False, client=("10.0.0.7", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            request = client.request(method, path, json=body, content=content, headers=dict(headers))
            if not engine:
                return await request
            answering = asyncio.to_thread(lambda: engine(waiting.get()))
            return (await asyncio.gather(request, answering))[0]

    return asyncio.run(get_answer())


@contextmanager
def serve_in_process(model, sessions=None, **options):
    """Serve a model in this process. The server starts in a fraction of a second.

    Requests without a temperature are answered greedily.

    sessions: folder in which all chats are stored, or None.
    options: fields of `ChatOptions`. Without `checkpoints`, the server makes no checkpoints.
    """
    raw = {"model": str(model), "threads": 1, "checkpoints": "0", **options}
    run, generation = ChatOptions.from_values(raw, given=raw), serve._RequestDefaults(temp=0)
    site = Site("here", run.policy, JobQueue(64), Defaults(generation.sampling()))
    open_pool = partial(serve._open, site, run, serve._ServeOptions(sessions=sessions), generation)
    ready, pools, errors = threading.Event(), [], []

    def work():
        try:
            with open_pool() as pool:
                site.start(pool)
                pools.append(pool)
                ready.set()
                pool.run(site.jobs)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
            ready.set()

    engine = threading.Thread(target=work, daemon=True)
    engine.start()
    assert ready.wait(TIMEOUT_S)
    try:
        if errors:
            raise errors[0]
        server = InProcessServer(site, pools[0])
        yield server
    finally:
        site.jobs.close()
        engine.join(TIMEOUT_S)
    server.close()
