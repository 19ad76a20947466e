"""Measure memory and the speed of reading and writing, for several cache configurations and depths.

A row is one cache configuration at one depth. It is measured in rounds. The rows of a depth take turns: each
gets one round at a time. When the rounds of a row have taken longer than its time limit, the row gets no more
rounds.

A round starts a new cache that has fewer tokens than the depth (see `depths`). The round writes two tokens,
reads a batch once or twice, and then writes up to 32 more tokens. The depth is never exceeded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.errors import KvtoolError, OutOfMemory
from kvtool.llama.libllama.devices import devices
from kvtool.measure import depths
from kvtool.system.memory import free_bytes, give_back, rss_bytes
from kvtool.units import archive_types, format_bytes

if TYPE_CHECKING:
    from kvtool.engine.settings import Settings
    from kvtool.llama.loaded.model import Model
    from kvtool.policy import Policy

_N_WRITE = 32
"""Maximum number of tokens written after a round's batch: twice the number of tokens between evictions."""

_N_SHORT = 64
"""Minimum size of a shortened batch, in tokens.

On a CPU, flash attention reads the tokens of a smaller batch one by one.
"""

_CHEAP_S = 1.0
"""A batch that takes at most about this many seconds is read twice. The second reading is reported."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Cache configuration.

    budget: in cells. None for `full`.
    flash: "on", "off" or "auto".
    cache_type: data type of keys and values.
    resident: number of archived tokens of each row that stay on the device.
    """

    name: str
    policy: str = "full"
    budget: int | None = None
    flash: str = "auto"
    cache_type: str = "f16"
    resident: int = 0


def cache_configs(budgets: Mapping[str, int]) -> list[CacheConfig]:
    """Return the configurations to measure. budgets: the budget in cells of each policy."""
    return [
        CacheConfig("full, flash off", flash="off"),
        CacheConfig("full, flash on", flash="on"),
        CacheConfig("full, q8_0, flash on", flash="on", cache_type="q8_0"),
        *(CacheConfig(f"{name}, {budget:,}", name, budget) for name, budget in budgets.items()),
    ]


@dataclass(slots=True)
class Row:
    """One cache configuration at one depth, with its results. Each list has one entry per round.

    Attributes
    ----------
    n_read
        Number of tokens of the batch to read.
    n_write
        Maximum number of tokens written after the batch.
    read, write
        Speed in tokens per second.
    first_s
        Seconds for the first token in a new cache.
    device_bytes
        Bytes of cache and buffers, from the memory counters of all devices. Without a GPU, the bytes of the
        cache. Empty if the counters do not change.
    host_bytes
        Bytes of the archive and the policy's state, and of the cache and signals if they are in host memory.
    process_bytes
        Resident memory of the process with the model, in bytes. None if the system does not report it.
    why
        Reason why the row cannot be measured, or None.
    """

    config: CacheConfig
    depth: int
    n_read: int
    n_write: int
    read: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)
    host_bytes: int | None = None
    process_bytes: int | None = None
    why: str | None = None
    seconds: float = 0.0

    @property
    def n_start(self) -> int:
        """Number of tokens of the stream when a round begins."""
        return self.depth - 2 - 2 * self.n_read - self.n_write

    def record(self) -> dict[str, Any]:
        """Return the row's results as a JSON object.

        what, policy, budget, flash, cache_type, resident, depth
            See `CacheConfig` and `Row`. `what` is the name of the configuration.
        rounds, n_read
            Number of rounds, and of tokens read in each.
        read_tokens_per_s, write_tokens_per_s, first_s
            Object with median, min and max of the rounds; null if nothing was measured.
        device_bytes
            Median of the rounds; null if the counters do not change.
        host_bytes, process_bytes, why
            See `Row`.
        """
        config = asdict(self.config)
        return {
            "what": config.pop("name"),
            **config,
            "depth": self.depth,
            "rounds": len(self.write),
            "n_read": self.n_read,
            "read_tokens_per_s": spread(self.read),
            "write_tokens_per_s": spread(self.write),
            "first_s": spread(self.first_s),
            "device_bytes": statistics.median_low(self.device_bytes) if self.device_bytes else None,
            "host_bytes": self.host_bytes,
            "process_bytes": self.process_bytes,
            "why": self.why,
        }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def sized(config: CacheConfig, depth: int, n_batch: int) -> Row:
    """Create a row without results. depth: at least 32."""
    return Row(config, depth, min(n_batch, depth // 4), min(_N_WRITE, depth // 8))


class Bench:
    """Measure rows of one model.

    settings: settings of all rows; a row's configuration changes some of them.
    rounds: maximum number of rounds of a row.
    row_s: time in seconds after which a row gets no more rounds.
    stop: set this attribute to True to end measuring after the current step.
    """

    def __init__(
        self, model: Model, settings: Settings, rows: Sequence[Row], *, rounds: int, row_s: float
    ) -> None:
        self.model = model
        self.settings = settings.for_model(model)
        self.rows = rows
        self.rounds = rounds
        self.row_s = row_s
        self.stop = False
        self._tokens = depths.text(model)
        self._starts: dict[tuple[str, int], depths.Arrays] = {}
        # clusters of the archive at the current depth. They belong to one row, because only one row of each
        # depth has an archive
        self._clusters: depths.Arrays = {}

    def measure(self) -> Iterator[Row]:
        """Measure the rows, depth by depth. Yield a row before each of its rounds. End when `stop` is set.

        The results of an unfinished round are not used.
        """
        for depth in dict.fromkeys(row.depth for row in self.rows):
            self._clusters = {}
            here = [row for row in self.rows if row.depth == depth]
            for row in here:
                row.why = self._too_much(row)
            for _ in range(self.rounds):
                for row in here:
                    if self.stop:
                        return
                    yield row
                    if row.why or row.seconds >= self.row_s:
                        continue
                    try:
                        # the first call for a configuration reads many tokens; do not count its time in
                        # row.seconds
                        saved = self._start(row)
                        if self.stop:
                            return
                        start = time.perf_counter()
                        self._round(row, saved)
                        row.seconds += time.perf_counter() - start
                    except KvtoolError as error:
                        row.why = str(error)
                    except MemoryError:
                        row.why = str(OutOfMemory())

    def _too_much(self, row: Row) -> str | None:
        """Return the reason why a row cannot be measured, if this is known in advance, else None."""
        model, config = self.model, row.config
        if config.policy == "full" and row.depth > model.n_ctx_train:
            return f"beyond the trained context ({model.n_ctx_train:,} tokens)"
        n_batch, n_cell = self.settings.n_batch, row.depth if config.budget is None else config.budget + 256
        try:
            needed = n_cell * model.layers.cell_bytes(config.cache_type, config.cache_type)
            archive = row.depth * model.layers.cell_bytes(*archive_types(self.settings.archive_type))
        except KvtoolError as error:
            return str(error)
        if config.flash != "on":
            # without flash attention, also count the attention scores of a batch in one layer
            needed += 4 * n_batch * n_cell * max((each.n_head_kv * n for each, n in model.groups), default=0)
        host, device = free_bytes(), device_free()
        # the archive is filled from a saved copy, so the host needs its bytes twice
        if policies.load(config.policy).has_recall() and 2 * archive > host:
            return f"its archive needs {_of(2 * archive, host)}"
        free = host if device is None else device
        return f"needs {_of(needed, free)}" if needed > free else None

    def _round(self, row: Row, saved: depths.Arrays | None) -> None:
        before = device_free()
        with closing(self._engine(row, saved)) as engine:
            at = iter(range(row.n_start, row.depth))
            first = self._write(engine, at)
            usual = self._write(engine, at)
            if not row.write:
                # assume that reading a token is 20 times as fast as writing one; if the batch would then
                # take more than row_s, shorten it
                row.n_read = min(row.n_read, max(int(20 * self.row_s / usual), _N_SHORT))
            if usual * row.n_read / 4 < _CHEAP_S:
                self._read(engine, row.n_read, at)
            read = self._read(engine, row.n_read, at)
            write, stretch = 0.0, engine.policy.slack or 4
            for n_written in range(1, row.n_write + 1):
                write += self._write(engine, at)
                if n_written % stretch == 0 and write > self.row_s / 2:
                    break
            if self.stop:
                return
            row.first_s.append(first)
            row.read.append(row.n_read / read)
            row.write.append(n_written / write)
            cache, after = engine.cache_bytes, device_free()
            is_on_host = before is None or after is None
            taken = cache if before is None or after is None else before - after
            if taken > 0:
                # leave out 0: the memory counter of a worker's device does not change
                row.device_bytes.append(taken)
            cached = cache + engine.signal_bytes
            row.host_bytes = engine.archive_bytes + engine.host_bytes + (cached if is_on_host else 0)
            give_back()
            row.process_bytes = rss_bytes()

    def _write(self, engine: Engine, at: Iterator[int]) -> float:
        """Decode the next token, unless `stop` is set. Return the time in seconds."""
        start = time.perf_counter()
        if not self.stop:
            engine.step(self._take(at, 1))
            # wait for the logits: a device may still be computing
            engine.context.logits()
        return time.perf_counter() - start

    def _read(self, engine: Engine, n: int, at: Iterator[int]) -> float:
        """Read the next n tokens, unless `stop` is set. Return the time in seconds."""
        tokens, start = self._take(at, n), time.perf_counter()
        engine.read(tokens, lambda: self.stop)
        if not self.stop:
            engine.context.logits()
        return time.perf_counter() - start

    def _take(self, at: Iterator[int], n: int) -> np.ndarray:
        """Return the next n tokens of the text. After its end, the text starts again."""
        return self._tokens[np.fromiter(at, np.intp, n) % len(self._tokens)]

    def _engine(self, row: Row, saved: depths.Arrays | None) -> Engine:
        """Return an engine that has the initial tokens of a round. saved: result of `_start`."""
        policy, settings = self._made_of(row)
        engine = Engine(self.model, policy, settings)
        try:
            if saved is None:
                depths.fill(engine, self._tokens, row.n_start)
                return engine
            n_past = depths.n_past(saved)
            if row.n_start > n_past:
                saved = depths.lengthened(saved, row.n_start - n_past, self.model.n_ctx_train)
            engine.restore(saved | self._clusters)
            if engine.context.archive:
                # keep the clusters for later rounds, because computing them is slow
                self._clusters = self._clusters or dict(engine.context.archive.save_clusters())
        except BaseException:
            engine.close()
            raise
        return engine

    def _made_of(self, row: Row) -> tuple[Policy, Settings]:
        config = row.config
        settings = replace(
            self.settings,
            type_k=config.cache_type,
            type_v=config.cache_type,
            flash=config.flash,
            archive=row.depth,
            resident=config.resident,
        )
        return policies.fit(config.policy, config.budget or row.depth), settings

    def _start(self, row: Row) -> depths.Arrays | None:
        """Return the arrays of `Engine.save` after the first tokens of a row. Return None for `full`."""
        policy, settings = self._made_of(row)
        if not policy.evicts:
            return None
        key = row.config.name, min(row.n_start, depths.n_start(policy))
        if key not in self._starts:
            tokens = self._tokens[np.arange(key[1]) % len(self._tokens)]
            self._starts[key] = depths.start(self.model, policy, settings, tokens, lambda: self.stop)
        return self._starts[key]


def device_free() -> int | None:
    """Free bytes of all GPUs together, from the devices' counters. None if there is no GPU."""
    free = [device["memory_free"] for device in devices() if device["type"] in ("gpu", "igpu")]
    return sum(free) if free else None


def _of(needed: int, free: int) -> str:
    return f"{format_bytes(needed)}, {format_bytes(free)} are free"
