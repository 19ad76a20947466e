"""Execute the runs of a grid. Each run has a separate process."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.errors import KvtoolError
from kvtool.measure.grid import Common, Run, identity
from kvtool.measure.run import RunInput, encode

_KILLED = 9

# do not use `python -m`, because it would also search the user's current folder for modules
_CHILD = "import sys; sys.path[:] = {!r}; from kvtool.measure.run import main; main()"


@dataclass(frozen=True, slots=True)
class Event:
    """Report of a run: its progress, or its record when it has ended.

    Attributes
    ----------
    run
        The run.
    n
        Number of tokens scored so far.
    nll
        Mean nll of these tokens in nats.
    record
        Record of the run, or of its error. None while the run is active.
    log
        Output of the process, for example of a user's policy. "" while the run is active.
    """

    run: Run
    n: int = 0
    nll: float = 0.0
    record: dict[str, Any] | None = None
    log: str = ""


class Runner:
    """Start the processes and collect their reports.

    Use it as a context manager. At the end of the block, processes that are still running are killed.

    folder: a temporary folder, which is removed at the end of the block.
    """

    def __init__(self, common: Common, tokens: np.ndarray) -> None:
        self.common = common
        self._folder = tempfile.TemporaryDirectory(prefix="kvtool-")
        self.folder = Path(self._folder.name)
        self._tokens = self.folder / "tokens.npy"
        np.save(self._tokens, tokens)
        self._running: dict[Run, subprocess.Popen[bytes]] = {}
        self._said: queue.SimpleQueue[tuple[Run, dict[str, Any] | None]] = queue.SimpleQueue()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._folder.cleanup()

    def run(
        self, grid: Sequence[Run], *, jobs: int = 1, against: Path | None = None, writes: bool = False
    ) -> Iterator[Event]:
        """Execute the runs, `jobs` at a time, and yield their events. A run's last event has its record.

        against: file with the full cache's predictions. writes: True for a grid of one run, which writes this
        file.
        """
        waiting = list(grid)
        ends: dict[Run, dict[str, Any]] = {}
        while waiting or self._running:
            while waiting and len(self._running) < jobs:
                self._start(waiting.pop(0), against, writes)
            run, message = self._said.get()
            if message is None:
                log = self._log(run).read_text(encoding="utf-8", errors="replace").strip()
                yield Event(run, record=self._record(run, ends.get(run), log), log=log)
            elif "n" in message:
                yield Event(run, message["n"], message["nll"] / max(message["n"], 1))
            else:
                ends[run] = message

    def _start(self, run: Run, against: Path | None, writes: bool) -> None:
        job = RunInput(run.options, str(self._tokens), str(against) if against else None, writes)
        with self._log(run).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD.format(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if run.options.verbose > 1 else log,
                # use another session, so that only the parent gets Ctrl-C from the terminal
                start_new_session=True,
            )
        self._running[run] = process
        assert process.stdin  # it is a pipe, so it is not None
        with suppress(OSError), process.stdin:
            process.stdin.write(encode(job))
        threading.Thread(target=self._listen, args=(run, process), daemon=True).start()

    def _listen(self, run: Run, process: subprocess.Popen[bytes]) -> None:
        with process:
            for line in process.stdout or ():
                # ignore lines that are not JSON: the last line of a killed process may be incomplete
                with suppress(ValueError):
                    self._said.put((run, json.loads(line)))
        self._said.put((run, None))

    def _log(self, run: Run) -> Path:
        return self.folder / f"{id(run)}.log"

    def _record(self, run: Run, end: dict[str, Any] | None, log: str) -> dict[str, Any]:
        """Return the record of a process that has ended. log: its output."""
        status = self._running.pop(run).returncode
        what = identity(self.common, run)
        if end:
            return what | dict(end.get("record", end))
        # the last line may be from `crash.guard`, which ends a process that llama.cpp would abort
        last_line = log.rpartition("\n")[2]
        if last_line.startswith("kvtool: "):
            return what | {"error": last_line.removeprefix("kvtool: "), "exit_code": status}
        error = f"the process was ended by signal {-status}" if status < 0 else f"exit status {status}"
        if status == -_KILLED:
            error += "; the system may be out of memory"
        return what | {"error": error, "exit_code": KvtoolError.exit_code}
