"""Rows of gpu_check.py that run kvtool: the library, graph splits, speed, and the parts of a token's time.

    python -m lab.benchmarks.gpu_rows bench -m 8b.gguf --way recall

Each line of the output is a JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtool import policies
from kvtool.build import sources
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.libllama.bindings import api, lib
from kvtool.llama.libllama.devices import devices, gpu_free_bytes, library_info
from kvtool.llama.libllama.log import start_backends
from kvtool.llama.loaded.model import Model
from kvtool.measure import bench as measure
from kvtool.measure import depths
from kvtool.measure.machine import machine

Row = dict[str, Any]

WAYS = {
    "full": measure.CacheConfig("full, flash on", flash="on"),
    "recall": measure.CacheConfig("recall, 512", "recall", 512),
    "resident": measure.CacheConfig("recall, 512, 2,048 resident", "recall", 512, flash="on", resident=2048),
    "streamingllm": measure.CacheConfig("streamingllm, 512", "streamingllm", 512),
    "h2o": measure.CacheConfig("h2o, 1,024", "h2o", 1024),
    "corm": measure.CacheConfig("corm, 1,024, flash on", "corm", 1024, flash="on"),
}

N_STEP = 64
"""Number of steps that are timed. Each decodes one token, and four of them evict."""


class Args(argparse.Namespace):
    what: str
    model: Path
    way: str
    small: bool


def facts(args: Args) -> Iterator[Row]:
    """Describe the machine, its devices, and the library."""
    info = library_info()
    yield {
        "what": "library",
        **{name: info[name] for name in ("version", "abi", "abi_wanted", "digest")},
    }
    yield {"what": "patch files", "digest": sources.patch_digest(sources.patches_dir())}
    yield {"what": "machine", **machine()}
    for device in devices():
        yield {"what": "device", **device}
    ask = "name,driver_version,memory.total,clocks.max.sm,pcie.link.gen.current,pcie.link.width.current"
    try:
        command = ["nvidia-smi", f"--query-gpu={ask}", "--format=csv,noheader"]
        text = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        text = "no nvidia-smi"
    yield {"what": "nvidia-smi", ask: text}


def settings_of(model: Model, way: measure.CacheConfig, depth: int) -> Settings:
    """Return an engine's settings for a cache configuration and a stream of `depth` tokens."""
    types = {"type_k": way.cache_type, "type_v": way.cache_type}
    return Settings(
        n_ctx=model.n_ctx_train,
        n_batch=256,
        archive=depth,
        flash=way.flash,
        resident=way.resident,
        **types,
    )


def bench(args: Args) -> Iterator[Row]:
    """Yield the rows of `kvtool bench` for the cache configuration --way."""
    way = WAYS[args.way]
    model = Model(args.model)
    for depth in (512, 2048) if args.small else (512, 8192, 32768):
        row = measure.sized(way, depth, 256)
        settings = settings_of(model, way, depth)
        for _ in measure.Bench(model, settings, [row], rounds=3, row_s=3.0).measure():
            pass
        yield row.record()


class Log:
    """llama.cpp's log, as text."""

    def __init__(self) -> None:
        start_backends()
        self.lines: list[str] = []
        self._callback = api.llama_log_callback(self._add)
        api.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _add(self, level: int, text: bytes, _: object) -> None:
        self.lines.append(text.decode("utf-8", "replace"))

    def take(self) -> str:
        """Return the text that was logged since the last call."""
        text = "".join(self.lines)
        self.lines.clear()
        return text


def splits(args: Args) -> Iterator[Row]:
    """Count the graph splits of a step of one token, and the operations that the CPU computes in it.

    graphs: number of graphs that a step computes, including the graphs of an eviction. splits: number of
    splits of the graph that decodes the token. The environment must have GGML_SCHED_DEBUG=2 and
    LLAMA_GRAPH_REUSE_DISABLE=1.
    """
    log = Log()
    model = Model(args.model)
    tokens = depths.text(model)
    for name in ("full", "streamingllm", "h2o", "recall", "resident", "corm"):
        way = WAYS[name]
        try:
            policy = policies.fit(way.policy, way.budget or 2048)
            engine = Engine(model, policy, settings_of(model, way, 4096))
            n = (way.budget or 512) + 256
            engine.read(np.resize(tokens, n))
            steps = []
            for at in range(20):
                log.take()
                engine.step(np.resize(tokens, n + at + 1)[-1:])
                engine.context.logits()
                steps.append(graphs_of(log.take()))
            engine.close()
        except Exception as error:  # noqa: BLE001
            yield {"what": way.name, "why": f"{type(error).__name__}: {error}"}
            continue
        decode = [max(graphs, key=lambda graph: sum(graph[1].values())) for graphs in steps if graphs]
        if not decode:
            yield {"what": way.name, "why": "the scheduler has logged no graph"}
            continue
        cpu = statistics.mode([json.dumps(dict(sorted(graph[2].items()))) for graph in decode])
        yield {
            "what": way.name,
            "splits": statistics.median(graph[0] for graph in decode),
            "most_splits": max(graph[0] for graph in decode),
            "nodes": statistics.median(sum(graph[1].values()) for graph in decode),
            "graphs": statistics.mean(len(graphs) for graphs in steps),
            "all_splits": statistics.mean(sum(graph[0] for graph in graphs) for graphs in steps),
            "on_cpu": json.loads(cpu),
        }


Graph = tuple[int, Counter[str], Counter[str]]


def graphs_of(text: str) -> list[Graph]:
    """Return splits, operations, and operations on the CPU for each graph in the scheduler's log."""
    graphs: list[Graph] = []
    backend = ""
    for line in text.splitlines():
        if match := re.match(r"## SPLIT #(\d+): (\S+)", line):
            backend = match[2]
            if match[1] == "0":
                graphs.append((0, Counter(), Counter()))
            graphs[-1] = (int(match[1]) + 1, *graphs[-1][1:])
        elif graphs and (match := re.match(r"node #\s*\d+ \(\s*([^)]*?)\s*\)", line)):
            graphs[-1][1][match[1]] += 1
            if backend.startswith("CPU"):
                graphs[-1][2][match[1]] += 1
    return graphs


def read(args: Args) -> Iterator[Row]:
    """Measure the seconds to read a prompt into an empty stream, and the device memory that this takes."""
    way = WAYS[args.way]
    model = Model(args.model)
    rng = np.random.default_rng(0)
    lengths = (600, 1200) if args.small else (8192, 32768, 65000)
    runs = [(n, way.budget and model.n_ctx_train or n) for n in lengths]
    if way.budget:
        # half of this text is beyond the context: there, the host rotates archived keys
        runs.append((lengths[1], lengths[1] // 2))
    for n, n_ctx in runs:
        free, lowest = gpu_free_bytes(), [gpu_free_bytes()]
        engine = Engine(
            model,
            policies.fit(way.policy, way.budget or n),
            Settings(n_ctx=n_ctx, n_batch=1024, flash="on"),
        )
        tokens = rng.integers(0, model.n_vocab, n)
        # do not time the first read: it compiles graphs, which later reads use again
        engine.read(tokens[: n // 4])
        engine.reset()

        def watched(lowest: list[int] = lowest) -> bool:
            lowest.append(gpu_free_bytes())
            return False

        began = time.perf_counter()
        engine.read(tokens, watched)
        engine.context.logits()
        took = time.perf_counter() - began
        engine.close()
        yield {
            "what": f"{way.name}, a prompt",
            "tokens": n,
            "n_ctx": n_ctx,
            "chunk": engine.exact_reader.n_chunk,
            "read_s": took,
            "device_bytes": free - min(lowest),
        }


def at_depth(model: Model, way: measure.CacheConfig, depth: int, tokens: np.ndarray) -> Engine:
    """Return an engine with this cache configuration whose state looks as if it had read `depth` tokens."""
    policy, settings = (
        policies.fit(way.policy, way.budget or depth + 256),
        settings_of(model, way, depth + 256),
    )
    if not policy.evicts:
        engine = Engine(model, policy, settings)
        depths.fill(engine, tokens, depth)
        return engine
    n = depths.n_start(policy)
    saved = depths.start(model, policy, settings, np.resize(tokens, n), lambda: False)
    engine = Engine(model, policy, settings)
    saved = depths.lengthened(saved, max(depth - depths.n_past(saved), 0), model.n_ctx_train)
    engine.restore(saved)
    return engine


class Timers:
    """Seconds spent in methods of objects, by name.

    If a timed method calls another timed method, the inner time is part of both times.
    """

    def __init__(self) -> None:
        self.wall: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()

    def wrap(self, owner: object, method: str, name: str | None = None) -> None:
        """Measure the time of a method. name: its name in `wall` and `cpu`, by default the method's name."""
        original: Callable[..., Any] = getattr(owner, method)
        name = name or method

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, cpu = time.perf_counter(), time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.wall[name] += time.perf_counter() - start  # type: ignore[assignment]
                self.cpu[name] += time.process_time() - cpu  # type: ignore[assignment]

        setattr(owner, method, timed)


def profile(args: Args) -> Iterator[Row]:
    """Measure the milliseconds per token in each part of `Engine.step`.

    decode: time of llama.cpp's graph, with the search and the upload of synthetic cells. logits: time of the
    wait for the device. observe: time to read signals. plan: time of the policy. archive: time to read cells
    from the device and to cluster them. edit: time to move cells on the device. decode_cpu: CPU time of all
    threads in decode. step: mean time of a step. quiet: median time of a step. The median step has no
    eviction, because only every 16th step evicts.
    """
    way = WAYS[args.way]
    model = Model(args.model)
    tokens = depths.text(model)
    # at depth 700 recall's archive is nearly empty: most of the time of its operation is then the time that
    # the interruption of the graph takes in each layer
    for depth in (700, 2048) if args.small else (700, 8192, 32768):
        engine, timers = at_depth(model, way, depth, tokens), Timers()
        for owner, method in (
            (engine.context, "decode"),
            (engine.context, "logits"),
            (engine.cache, "observe"),
            (engine.cache, "_archive"),
            (engine.cache, "edit"),
        ):
            timers.wrap(owner, method, method.strip("_"))
        ask = engine.cache.ask

        def planned(what: str, *rest: object, ask: Callable[..., Any] = ask, timers: Timers = timers) -> Any:
            start = time.perf_counter()
            try:
                return ask(what, *rest)
            finally:
                timers.wall[what] += time.perf_counter() - start  # type: ignore[assignment]

        engine.cache.ask = planned  # type: ignore[method-assign]
        taken = []
        for at in range(8 + N_STEP):
            if at == 8:
                # do not count the first steps, which compile and capture graphs
                timers.wall.clear()
                timers.cpu.clear()
                taken.clear()
            start = time.perf_counter()
            engine.step(tokens[at % len(tokens)][None])
            engine.context.logits()
            taken.append(time.perf_counter() - start)
        parts = {f"{name}_ms": 1e3 * seconds / N_STEP for name, seconds in sorted(timers.wall.items())}
        yield {
            "what": f"{way.name}, parts",
            "depth": depth,
            "archived": engine.n_archived,
            "threads": engine.context.n_threads,
            "step_ms": 1e3 * sum(taken) / N_STEP,
            "quiet_ms": 1e3 * statistics.median(taken),
            **parts,
            "decode_cpu_ms": 1e3 * timers.cpu["decode"] / N_STEP,
        }
        engine.close()


class Watch:
    """Measure the time of one operation, with the callback that llama.cpp calls before and after each node.

    Attributes
    ----------
    n, seconds
        Number of nodes with this operation, and the sum of the seconds between their two callbacks.
    """

    def __init__(self, operation: bytes) -> None:
        describe = lib.ggml_op_desc
        describe.restype, describe.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self.n, self.seconds, self._start = 0, 0.0, 0.0

        def seen(tensor: int, asks: bool, _: object) -> bool:
            if asks:
                if describe(tensor) != operation:
                    return False
                self._start = time.perf_counter()
                return True
            self.n += 1
            self.seconds += time.perf_counter() - self._start
            return True

        self.callback = api.ggml_backend_sched_eval_callback(seen)


def search(args: Args) -> Iterator[Row]:
    """Measure the milliseconds per token of `recall`'s CPU operation: search, attention, synthetic cells.

    The time of the operation begins when its inputs are on the host. The callback makes the rest of the step
    slower.
    """
    way = WAYS[args.way]
    watch = Watch(b"CUSTOM")
    original = Decoder.__init__

    def watched(self: Decoder, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs, on_tensor=watch.callback)

    Decoder.__init__ = watched  # type: ignore[method-assign]
    model = Model(args.model)
    tokens = depths.text(model)
    for depth in (700, 2048) if args.small else (700, 8192, 32768):
        engine = at_depth(model, way, depth, tokens)
        for at in range(4 + 32):
            if at == 4:
                watch.n, watch.seconds, start = 0, 0.0, time.perf_counter()
            engine.step(tokens[at % len(tokens)][None])
            engine.context.logits()
        step_ms = 1e3 * (time.perf_counter() - start) / 32
        row = {"what": f"{way.name}, search", "depth": depth, "threads": engine.context.n_threads}
        yield row | {
            "search_ms": 1e3 * watch.seconds / 32,
            "searches": watch.n / 32,
            "watched_step_ms": step_ms,
        }
        engine.close()


def hybrid(args: Args) -> Iterator[Row]:
    """Measure the cost of checkpoints, draft states and residents, for a model with recurrent layers.

    First row: read_s and plain_s are the times to read the tokens with and without checkpoints, measured in
    turns. copy_ms is the time to take one more checkpoint.

    Other rows: step_ms is the time of a step of one token with room for draft tokens, or with residents
    (archived tokens that stay on the device). none_ms is the time of the same step with neither.
    """
    model = Model(args.model)
    n = 4096 if args.small else 16384
    tokens = np.resize(depths.text(model), n)

    def opened(checkpoints: int | None, n_draft: int = 0, name: str = "recall") -> Engine:
        way = WAYS[name]
        settings = settings_of(model, way, n + 1024)
        settings = replace(settings, n_batch=1024, checkpoints=checkpoints, n_draft=n_draft)
        return Engine(model, policies.fit(way.policy, way.budget), settings)

    def seconds(engine: Engine, put: Callable[[np.ndarray], Any], tokens: np.ndarray) -> float:
        began = time.perf_counter()
        put(tokens)
        engine.context.logits()
        return time.perf_counter() - began

    engines = {"read_s": opened(None), "plain_s": opened(0)}
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(4):
        for name, engine in engines.items():
            engine.reset()
            taken[name].append(seconds(engine, engine.read, tokens))
    engine = engines["read_s"]
    n_made, n_bytes = len(engine.checkpoints), engine.checkpoints.n_bytes
    # decode a new token first: without it, there would be nothing to copy
    seconds(engine, engine.step, tokens[:1])
    began = time.perf_counter()
    engine.checkpoints.take()
    copy_ms = 1e3 * (time.perf_counter() - began)
    yield {
        "what": "checkpoints while reading",
        "tokens": n,
        # leave out the first round, which compiles graphs
        **{name: statistics.median(each[1:]) for name, each in taken.items()},
        "checkpoints": n_made,
        "spacing": engine.checkpoints.spacing,
        "bytes": n_bytes // max(n_made, 1),
        "copy_ms": copy_ms,
    }
    for engine in engines.values():
        engine.close()

    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("a token with 4 draft states", 1024, {"n_draft": 4}),
        ("a token with 15 draft states", 1024, {"n_draft": 15}),
        ("a token with residents", n, {"name": "resident"}),
    ]
    for what, n_read, how in cases:
        engines = {"none_ms": opened(0), "step_ms": opened(0, **how)}
        taken = {name: [] for name in engines}
        for engine in engines.values():
            engine.read(tokens[:n_read])
        for at in range(8 + N_STEP):
            for name, engine in engines.items():
                taken[name].append(seconds(engine, engine.step, tokens[at][None]))
        yield {
            "what": what,
            **{name: 1e3 * statistics.median(each[8:]) for name, each in taken.items()},
            "repeated": engines["step_ms"].residents.n_repeated,
        }
        for engine in engines.values():
            engine.close()


WHAT = {each.__name__: each for each in (facts, bench, read, splits, profile, search, hybrid)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("--way", choices=WAYS, default="full")
    parser.add_argument("--small", action="store_true", help="small depths, to try the program on a CPU")
    args = parser.parse_args(namespace=Args())
    for row in WHAT[args.what](args):
        print(json.dumps({"at_s": round(time.perf_counter(), 1), **row}), flush=True)


if __name__ == "__main__":
    main()
