"""Threads for functions that use the model, such as its tokenizer, while the engine may be computing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")

_N_MAX = 4
"""Maximum number of functions that run at the same time."""


class ModelThreads:
    """Calls functions that use the model. Each runs in its own thread, and so does not block the event loop.

    llama.cpp cannot be interrupted while it tokenizes a long text. The threads are daemon threads, so that
    the process can end without waiting for them.
    """

    def __init__(self) -> None:
        self._permits = threading.Semaphore(_N_MAX)

    async def run(self, function: Callable[..., _T], *values: Any) -> _T:
        """Return the result of a function.

        If the caller is cancelled before the function begins, the function never runs.
        """
        future: Future[_T] = Future()

        def work() -> None:
            with self._permits:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(function(*values))
                except BaseException as error:  # noqa: BLE001
                    # the caller raises this error again
                    future.set_exception(error)

        threading.Thread(target=work, name="tokenizer", daemon=True).start()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait until no function runs. Later functions never begin, so the model can then be freed."""
        for _ in range(_N_MAX):
            self._permits.acquire()
