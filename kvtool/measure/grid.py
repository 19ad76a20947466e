"""A grid of policies, budgets and cache types on one text: which cells there are, and running them.

A cell is known by what it is a result of (`KEY`), so that a run goes on where another ended, on whichever
machine.
"""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtool import policies
from kvtool.errors import KvtoolError, UsageError
from kvtool.measure import cell as one
from kvtool.measure import divergence, records
from kvtool.measure.statistics import block_counts, mean_error
from kvtool.models import budget
from kvtool.models.header import ModelInfo

KEY = (
    "model_sha256",
    "text_sha256",
    "tokens",
    "policy",
    "policy_sha256",
    "params",
    "budget",
    "type_k",
    "type_v",
    "positions",
    "evict_every",
    "n_ctx",
    "n_batch",
    "flash",
    "gpu_layers",
    "kvtool",
    "llama_cpp_python",
    "patch",
)
"""What makes a cell another cell."""

_COARSE = ("q4_0", "q4_1")

_KILLED = 9

# -m would look for modules in the folder where the user is
_CHILD = "import sys; sys.path[:] = {!r}; from kvtool.measure.cell import main; main()"


@dataclass(frozen=True, slots=True)
class Common:
    """What all cells of a grid share. what: the same of every record; n_tokens: of the text."""

    what: Mapping[str, Any]
    model: Path
    n_tokens: int
    n_ctx: int
    n_batch: int
    positions: str
    flash: str
    threads: int
    gpu_layers: int | None = None
    rpc: tuple[str, ...] = ()
    verbose: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """asked: the budget as it was typed, None for what takes all it needs. budget: in cells.

    label: the policy as it was typed. policy_sha256: of its file where it is one of the user's.
    """

    label: str
    policy: str
    options: tuple[str, ...]
    params: Mapping[str, Any]
    asked: str | None
    budget: int
    evict_every: int | None
    n_batch: int
    positions: str
    type_k: str
    type_v: str
    policy_sha256: str | None = None

    @property
    def row(self) -> str:
        """The policy as it was typed, and the type of the cache where it is not f16."""
        return self.label if self.type_k == "f16" else f"{self.label} {self.type_k}"

    @property
    def group(self) -> tuple[str | None, str, str]:
        """Cells of one group are compared with each other."""
        return self.asked, self.type_k, self.type_v


def split_policy(text: str) -> tuple[str, tuple[str, ...]]:
    """ "h2o:decay=0.999:window=64" is ("h2o", ("decay=0.999", "window=64")). A path may have colons too."""
    name, *options = re.split(r":(?=\w+=)", text.strip())
    return name, tuple(options)


def cells(
    common: Common,
    info: ModelInfo,
    wanted: Sequence[str],
    budgets: Sequence[str],
    types: Sequence[str],
    *,
    evict_every: int | None = None,
    combine: bool = False,
) -> list[Cell]:
    """The grid in its order: what has no budget first, then budget by budget.

    wanted: policies with their parameters. `full` has a cell for each type; the others for the first one,
    or with `combine` for each. Rows that may differ take what they need, and are held to each budget as well.
    Raises UsageError or InputError for what cannot be.
    """
    split = [(text.strip(), *split_policy(text)) for text in wanted]
    found: dict[str, Cell] = {}

    def add(label: str, name: str, options: tuple[str, ...], asked: str | None, kind: str) -> None:
        cell = _cell(common, info, label, name, options, asked, kind, evict_every)
        found.setdefault(records.key(identity(common, cell), KEY), cell)

    for label, name, options in split:
        if name == "full" or policies.load(name).ragged:
            for kind in types if name == "full" or combine else types[:1]:
                add(label, name, options, None, kind)
    for asked in budgets:
        for label, name, options in split:
            if name != "full":
                for kind in types if combine else types[:1]:
                    add(label, name, options, asked, kind)
    return list(found.values())


def _cell(
    common: Common,
    info: ModelInfo,
    label: str,
    name: str,
    options: tuple[str, ...],
    asked: str | None,
    kind: str,
    evict_every: int | None,
) -> Cell:
    from kvtool.llama.context import choose_flash

    policy_type = policies.load(name)
    policies.parse_options(policy_type, list(options))
    # raises for a type that does not fit the model's heads
    info.cell_bytes(kind, kind)
    choose_flash(common.flash, kind, policy_type.ragged)
    n, n_batch, positions = common.n_ctx, common.n_batch, common.positions
    if name == "full":
        n, positions = min(n, common.n_tokens), "auto"
    elif positions == "in-cache" and kind in _COARSE:
        raise UsageError(
            f"{kind} keys do not outlive being turned at every eviction; "
            "choose --positions auto, or --types q8_0"
        )
    elif asked is not None:
        n, is_bound = budget.parse(asked, info, n_batch, kind, kind)
        if is_bound:
            n_batch = budget.batch_within(n, n_batch)
    if n > common.n_ctx:
        raise UsageError(f"the context is {common.n_ctx} tokens; choose at most that many cells, not {n}")
    policy = policies.fit(name, n, evict_every, list(options))
    return Cell(
        label,
        name,
        options,
        policies.chosen(policy),
        asked,
        n,
        policy.slack or None,
        n_batch,
        positions,
        kind,
        kind,
        policies.file_sha256(name),
    )


def identity(common: Common, cell: Cell) -> dict[str, Any]:
    """What a record is a record of."""
    return {
        "policy": cell.policy,
        "params": dict(cell.params),
        "budget": cell.budget,
        "type_k": cell.type_k,
        "type_v": cell.type_v,
        **common.what,
        "policy_sha256": cell.policy_sha256,
        "tokens": common.n_tokens,
        "positions": cell.positions,
        "evict_every": cell.evict_every,
        "n_ctx": common.n_ctx,
        "n_batch": cell.n_batch,
        "flash": common.flash,
        "gpu_layers": common.gpu_layers,
        "threads": common.threads,
        "rpc": list(common.rpc),
    }


def shard(grid: Sequence[Cell], text: str) -> list[Cell]:
    """Every n-th cell: "2/3" is the second, the fifth, ... Raises UsageError."""
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text.strip())
    i, n = map(int, match.groups()) if match else (0, 0)
    if not 1 <= i <= n:
        raise UsageError(f"a shard is i/n with i from 1 to n, 1/4 for example, got {text!r}")
    return list(grid[i - 1 :: n])


def _rank(record: Mapping[str, Any] | None) -> int:
    """How much it says: 0 nothing, 1 an error, 2 no divergence as full had failed, 3 everything."""
    if record is None or "error" in record:
        return int(record is not None)
    return 2 if record.get("kl") is None else 3


@dataclass(slots=True)
class Results:
    """The records of a grid by cell, and of other grids in the same file."""

    common: Common
    grid: Sequence[Cell]
    of_cell: dict[Cell, dict[str, Any]] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)

    def take(self, there: Iterable[dict[str, Any]]) -> None:
        """Sorts all that a file holds. Of several records of a cell the first that says most counts."""
        by_key = {records.key(identity(self.common, cell), KEY): cell for cell in self.grid}
        self.others = []
        for record in there:
            cell = by_key.get(records.key(record, KEY))
            if cell is None:
                self.others.append(record)
            elif _rank(record) > _rank(self.of_cell.get(cell)):
                self.of_cell[cell] = record

    def missing(self, kl: bool = False) -> list[Cell]:
        """Cells without a record, with an error, or where kl is wanted without one."""
        return [cell for cell in self.grid if _rank(self.of_cell.get(cell)) < (3 if kl else 2)]

    def failed(self) -> list[Cell]:
        return [cell for cell in self.grid if _rank(self.of_cell.get(cell)) == 1]

    def finished(self) -> list[dict[str, Any]]:
        """All records, the grid's in its order with what only the whole grid tells, then the others."""
        found = []
        for cell in self.grid:
            if record := self.of_cell.get(cell):
                found.append(record if "error" in record else record | self._against_best(cell))
        return found + self.others

    def _against_best(self, cell: Cell) -> dict[str, Any]:
        """The difference of nll to the best other row of the same budget and types, block by block."""
        others = [
            (self.of_cell[other]["nll"], i)
            for i, other in enumerate(self.grid)
            if other.group == cell.group
            and other != cell
            and cell.asked is not None
            and "nll" in self.of_cell.get(other, {})
        ]
        if not others:
            return {"best_other": None, "nll_minus_best": None, "nll_minus_best_stderr": None}
        best = self.grid[min(others)[1]]
        record, other = self.of_cell[cell], self.of_cell[best]
        difference = np.subtract(record["nll_blocks"], other["nll_blocks"])
        mean, error = mean_error(difference, block_counts(record["n_scored"]))
        return {
            "best_other": best.label,
            "nll_minus_best": mean,
            "nll_minus_best_stderr": None if np.isnan(error) else error,
        }


def reference(common: Common) -> Path:
    """Where the full cache's predictions of this text are, or would be."""
    names = ("model_sha256", "text_sha256", "kvtool", "llama_cpp_python", "patch")
    what = {name: common.what[name] for name in names}
    return divergence.path_of(
        what
        | {
            "tokens": common.n_tokens,
            "n_ctx": common.n_ctx,
            "n_batch": common.n_batch,
            "flash": common.flash,
            "gpu_layers": common.gpu_layers,
        }
        # -fa auto means something else there
        | ({"rpc": True} if common.rpc else {})
    )


def full_cell(common: Common) -> Cell:
    """The one that the reference is made by."""
    n = min(common.n_ctx, common.n_tokens)
    return Cell("full", "full", (), {}, None, n, None, common.n_batch, "auto", "f16", "f16")


@dataclass(frozen=True, slots=True)
class Event:
    """What a running cell says: n tokens scored so far with that mean nll, or its record."""

    cell: Cell
    n: int = 0
    nll: float = 0.0
    record: dict[str, Any] | None = None


class Runner:
    """Runs cells, each in a process of its own. Use it as a context: at its end no process is left."""

    def __init__(self, common: Common, tokens: np.ndarray) -> None:
        self.common = common
        self._folder = tempfile.TemporaryDirectory(prefix="kvtool-")
        self._tokens = Path(self._folder.name) / "tokens.npy"
        np.save(self._tokens, tokens)
        self._running: dict[Cell, subprocess.Popen[bytes]] = {}
        self._said: queue.SimpleQueue[tuple[Cell, dict[str, Any] | None]] = queue.SimpleQueue()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        self._folder.cleanup()

    def run(
        self, grid: Sequence[Cell], *, jobs: int = 1, against: Path | None = None, writes: bool = False
    ) -> Iterator[Event]:
        """Runs the cells, so many at once; each ends with an event that has its record, maybe of an error.

        against: the reference; writes: the only cell makes it.
        """
        waiting = list(grid)
        ends: dict[Cell, dict[str, Any]] = {}
        while waiting or self._running:
            while waiting and len(self._running) < jobs:
                self._start(waiting.pop(0), against, writes)
            cell, said = self._said.get()
            if said is None:
                yield Event(cell, record=self._record(cell, ends.get(cell)))
            elif "n" in said:
                yield Event(cell, said["n"], said["nll"] / max(said["n"], 1))
            else:
                ends[cell] = said

    def _start(self, cell: Cell, against: Path | None, writes: bool) -> None:
        common = self.common
        job = one.Job(
            model=str(common.model),
            tokens=str(self._tokens),
            policy=cell.policy,
            options=cell.options,
            budget=cell.budget,
            evict_every=cell.evict_every,
            type_k=cell.type_k,
            type_v=cell.type_v,
            positions=cell.positions,
            n_ctx=common.n_ctx,
            n_batch=cell.n_batch,
            flash=common.flash,
            threads=common.threads,
            gpu_layers=common.gpu_layers,
            rpc=common.rpc,
            reference=str(against) if against else None,
            writes=writes,
            verbose=common.verbose,
        )
        with self._log(cell).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD.format(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if common.verbose else log,
                # Ctrl-C on the terminal is for the parent alone
                start_new_session=True,
            )
        self._running[cell] = process
        assert process.stdin  # a pipe
        with suppress(OSError), process.stdin:
            process.stdin.write(one.encode(job))
        threading.Thread(target=self._listen, args=(cell, process), daemon=True).start()

    def _listen(self, cell: Cell, process: subprocess.Popen[bytes]) -> None:
        with process:
            for line in process.stdout or ():
                # half a line is the last of a process that died
                with suppress(ValueError):
                    self._said.put((cell, json.loads(line)))
        self._said.put((cell, None))

    def _log(self, cell: Cell) -> Path:
        return Path(self._folder.name) / f"{id(cell)}.log"

    def _record(self, cell: Cell, end: dict[str, Any] | None) -> dict[str, Any]:
        """What the process that has ended leaves behind."""
        status = self._running.pop(cell).returncode
        what = identity(self.common, cell)
        if end and "record" in end:
            return {**what, **end["record"]}
        if end:
            return what | end
        # a guard's line, if there is one
        said = self._log(cell).read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        if said.startswith("kvtool: "):
            return what | {"error": said.removeprefix("kvtool: "), "exit_code": status}
        error = f"the process has died of signal {-status}" if status < 0 else f"exit status {status}"
        if status == -_KILLED:
            error += "; the system may be out of memory"
        return what | {"error": error, "exit_code": KvtoolError.exit_code}
