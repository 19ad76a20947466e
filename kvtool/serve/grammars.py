"""Clients' grammars, in a process of their own: one line can keep llama.cpp busy for ever, or crash it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.errors import KvtoolError, UsageError
from kvtool.llama.grammar import Constraint, Grammar, schema_grammar
from kvtool.llama.model import Model

STEP_S = 5.0
"""Seconds of CPU time that a grammar may take for a step, and to begin: a busy machine is not its fault."""

_WAIT_S = 120.0
"""Seconds that the process may take to start, and to answer."""

_CAN_TIME = hasattr(signal, "setitimer")

_MOST_BYTES = 2 * 2**30
"""The most memory that grammars may take."""


class Grammars:
    """Starts the process with the first grammar, and again after one that ended it.

    Parameters
    ----------
    model
        The file that has the vocabulary.
    step_s
        As `STEP_S`. Where the system cannot tell a process's CPU time, it is the clock's.
    """

    def __init__(self, model: Path, step_s: float = STEP_S) -> None:
        self._model = model
        self._step_s = step_s
        self._process: BaseProcess | None = None
        self._link: Connection[Any, Any] | None = None

    def of_schema(self, schema: str) -> str:
        """As `schema_grammar`."""
        self._start()
        grammar: str = self.ask("schema", schema)
        return grammar

    def begin(self, model: Model, grammar: str) -> Constraint:
        """What a sampler needs of a grammar. There is one at a time. Raises UsageError."""
        self._start()
        self.ask("begin", grammar)
        return _Apart(self, model.n_vocab)

    def ask(self, what: str, *of: Any) -> Any:
        """Runs a method in the process. Raises UsageError for what it says, and where it does not answer."""
        link = self._link
        try:
            if not link:
                raise EOFError
            link.send((what, *of))
            is_slow = not link.poll(_WAIT_S if _CAN_TIME else self._step_s)
            if not is_slow:
                error, answer = link.recv()
        except (EOFError, OSError):
            is_slow = self._is_out_of_time()
            if not is_slow:
                self.close()
                raise UsageError("llama.cpp has crashed on the grammar; simplify it") from None
        if is_slow:
            self.close()
            raise UsageError(f"a step of the grammar takes more than {self._step_s:g} s; simplify it")
        if error:
            raise UsageError(error)
        return answer

    def close(self) -> None:
        """Ends the process, if it runs."""
        if self._process:
            self._process.kill()
            self._process.join()
        if self._link:
            self._link.close()
        self._process = self._link = None

    def _is_out_of_time(self) -> bool:
        """Whether the process, which has ended, was ended by its timer."""
        if not (self._process and _CAN_TIME):
            return False
        self._process.join(_WAIT_S)
        return self._process.exitcode == -signal.SIGPROF

    def _start(self) -> None:
        if self._process and self._process.is_alive():
            return
        self.close()
        spawn = multiprocessing.get_context("spawn")
        self._link, theirs = spawn.Pipe()
        args = str(self._model), theirs, self._step_s
        process = spawn.Process(target=_work, args=args, name="grammars", daemon=True)
        process.start()
        self._process = process
        theirs.close()
        with suppress(EOFError, OSError):
            # it says so when it has loaded the vocabulary
            if self._link.poll(_WAIT_S):
                self._link.recv()
                return
        self.close()
        raise UsageError("the process for grammars does not start; leave the grammar out")


class _Apart(Constraint):
    """The grammar that was begun last."""

    def __init__(self, grammars: Grammars, n_vocab: int) -> None:
        self._grammars = grammars
        self._n_vocab = n_vocab

    def take(self, token: int) -> bool:
        return bool(self._grammars.ask("take", token))

    def fitting(self) -> np.ndarray:
        bits = np.frombuffer(self._grammars.ask("fitting"), np.uint8)
        return np.unpackbits(bits, count=self._n_vocab).astype(np.bool_)

    def close(self) -> None:
        # the next one takes its place
        pass


# in the process


def _work(path: str, link: Connection[Any, Any], step_s: float) -> None:
    """Answers what it is asked over the link, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # nobody reads a crash's output, and ggml would start a debugger
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["GGML_NO_BACKTRACE"] = "1"
    own = _Own(Model(path, vocab_only=True))
    _limit_memory()
    with suppress(EOFError, OSError):
        link.send(None)
        while True:
            what, *of = link.recv()
            error, answer = "", None
            _limit_time(step_s)
            try:
                answer = getattr(own, what)(*of)
            except KvtoolError as said:
                error = str(said)
            except Exception as said:  # noqa: BLE001
                # such as a lack of memory
                error = f"the grammar cannot be used: {type(said).__name__}"
            _limit_time(0)
            link.send((error, answer))


class _Own:
    """What can be asked for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._grammar: Grammar | None = None

    def schema(self, schema: str) -> str:
        return schema_grammar(schema)

    def begin(self, grammar: str) -> None:
        if self._grammar:
            self._grammar.close()
        self._grammar = None
        self._grammar = Grammar(self._model, grammar)

    def take(self, token: int) -> bool:
        assert self._grammar
        return self._grammar.take(token)

    def fitting(self) -> bytes:
        assert self._grammar
        return np.packbits(self._grammar.fitting()).tobytes()


def _end_with_parent() -> None:
    """Ends the process with the server's, even in the middle of a grammar."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(0)


def _limit_time(seconds: float) -> None:
    """Lets the system end the process after so much CPU time from now on, in llama.cpp's code as well."""
    if _CAN_TIME:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory() -> None:
    """As far as the system can: what a grammar asks for beyond is a crash."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        resource.setrlimit(resource.RLIMIT_AS, (now + _MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
