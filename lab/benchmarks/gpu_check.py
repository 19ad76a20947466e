"""Measure kvtool on a GPU in nine minutes. This needs only Python, NumPy and the pack from gpu_pack.py.

    python3 -m lab.benchmarks.gpu_check build/gpu-check --out DIR
    python3 -m lab.benchmarks.gpu_check build/gpu-check --out DIR --only 2a,2b --seconds 120

Each part runs in a separate process with a time limit, so that a crash affects only one part. A part prints
its measurements as rows. A row is written to DIR/gpu-check.json as soon as it exists. At the end, all rows
are printed as tables. --small uses sizes for a CPU.

1   the device and the library
2a  flash attention with a mask per KV head         2b  copies between host and device
2c  single rows written and read                    2d  reading with streamed keys and values
2e  writing with resident tokens and means          3s  graph splits of a token, by policy
3   reading and writing, by policy and depth        3r  reading a prompt, full cache and recall
4   parts of a token's time                         5   the engine's tests
6   checkpoints and draft states of a model with recurrent layers
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Row = dict[str, Any]
Env = tuple[tuple[str, str], ...]

CUDA_FOLDERS = (
    "/usr/local/cuda/lib64",
    "/usr/local/cuda*/lib64",
    "/usr/local/cuda*/targets/x86_64-linux/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
)
DRIVER = "libcuda.so.1"
CUDA_LIBRARIES = ("libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", DRIVER)

MODELS = {
    "8b.gguf": "",
    "hybrid.gguf": "--arch qwen35 --groups 16 --layers 32 --heads 16 --kv-heads 4 --ff 9216",
}
"""Options of random_model.py for each model: an 8B model, and a model in the shape of Qwen 3.5 4B."""

_FEW = "--layers 4 --heads 4 --kv-heads 2 --head-dim 64 --ff 256"
SMALL_MODELS = {"8b.gguf": _FEW, "hybrid.gguf": f"--arch qwen35 {_FEW}"}
"""Options of random_model.py for each model if --small is set."""

MAX_ERROR = 0.02
"""Attention in F16 or q8_0 counts as wrong if its relative error is not below this."""

TAIL = 1500
"""Number of characters of a failed part's stderr that are kept in its row."""


@dataclass(frozen=True)
class Part:
    """A part of the check: a program in its own process.

    Attributes
    ----------
    name, limit_s
        Name of the part, and time in seconds after which it is killed.
    command
        Arguments for Python.
    env
        Environment variables.
    model
        Name in MODELS of the random model that the part needs; "" if it needs no model.
    """

    name: str
    limit_s: float
    command: tuple[str, ...]
    env: Env = ()
    model: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path, help="the folder that gpu_pack.py has written")
    parser.add_argument("--out", type=Path, required=True, help="where results and logs go")
    parser.add_argument("--only", default="", help="parts, separated by commas (default: all)")
    parser.add_argument("--seconds", type=float, default=520, help="seconds for all parts (default: 520)")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the program on a CPU")
    parser.add_argument("--workers", type=int, default=0, help="processes of the tests (default: by cores)")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="gpu-check-") as work,
        tempfile.TemporaryDirectory(prefix="gpu-check-", dir=_fast_folder()) as fast,
    ):
        Check(args, Path(work), Path(fast), deadline).run()


def _fast_folder() -> str | None:
    """Return a folder in memory that has room for the models, or None.

    The folder is not for libraries: they may fail to load from there.
    """
    shared = "/dev/shm"
    return shared if os.path.isdir(shared) and shutil.disk_usage(shared).free > 12e9 else None


class Check:
    """Run all parts, one after the other.

    Parameters
    ----------
    args
        The command line.
    work
        A folder for the unpacked libraries.
    models
        A folder for the random models.
    deadline
        Time (of `time.monotonic`) at which all parts must have ended.
    """

    def __init__(self, args: argparse.Namespace, work: Path, models: Path, deadline: float) -> None:
        self.args, self.work, self.models, self.deadline = args, work, models, deadline
        self.rows: list[Row] = []
        self.started = time.monotonic()
        self.manifest: Row = json.loads((args.pack / "manifest.json").read_text())
        self.env = unpack(args.pack, work, self.manifest["kernels"])
        self._writers: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Run the parts in --only, or all parts. Then print the table."""
        wanted = [name for name in self.args.only.split(",") if name]
        parts = [part for part in self.parts() if not wanted or part.name in wanted]
        for name in dict.fromkeys(part.model for part in parts if part.model):
            # write the models while the first parts run, because a writer needs only one core
            self._writers[name] = self._write_model(name)
        for part in parts:
            if part.model and not self._model_ready(part):
                continue
            self._run(part)
            if part.name == "1" and not self.args.small and not self._has_gpu():
                # do not run the remaining parts: with the sizes for a GPU, they would take hours on a CPU
                self._add(
                    {"part": "1", "what": "GPU", "why": "the library sees none: nothing else is measured"}
                )
                break
        for writer in self._writers.values():
            if writer.poll() is None:
                writer.terminate()
                writer.wait()
        print("\n".join(table(self.rows)))
        print(f"{time.monotonic() - self.started:.0f} s; all rows: {self.args.out / 'gpu-check.json'}")

    def _has_gpu(self) -> bool:
        return any(row.get("type") in ("gpu", "igpu") for row in self.rows if row.get("what") == "device")

    def parts(self) -> Iterator[Part]:
        """Yield the parts, the most important first."""
        small = ["--small"] if self.args.small else []
        micro, rows = (("-m", f"lab.benchmarks.{name}") for name in ("ggml_micro", "gpu_rows"))
        yield Part("1", 40, (*rows, "facts"))
        for name, limit_s in (("2a", 110), ("2b", 30), ("2c", 30), ("2d", 60), ("2e", 60)):
            yield Part(name, limit_s, (*micro, name, *small))

        def on(model: str, name: str, limit_s: float, what: str, *more: str, env: Env = ()) -> Part:
            path = str(self.models / model)
            return Part(name, limit_s, (*rows, what, "-m", path, *small, *more), env, model)

        # log each graph that the scheduler splits, and do not reuse graphs: then each step logs its graph
        logged = (("GGML_SCHED_DEBUG", "2"), ("LLAMA_GRAPH_REUSE_DISABLE", "1"))
        yield on("8b.gguf", "3s", 60, "splits", env=logged)
        for way in ("recall", "full", "resident", "streamingllm", "h2o"):
            yield on("8b.gguf", "3", 75, "bench", "--way", way)
        for way in ("recall", "full"):
            yield on("8b.gguf", "3r", 60, "read", "--way", way)
        for way in ("recall", "streamingllm", "full"):
            yield on("8b.gguf", "4", 60, "profile", "--way", way)
        yield on("8b.gguf", "4", 40, "search", "--way", "recall")
        yield self._tests()
        yield on("hybrid.gguf", "6", 60, "hybrid")

    def _tests(self) -> Part:
        n = self.args.workers or max(min((os.cpu_count() or 2) - 2, 14), 1)
        command = ["-m", "pytest", "-v", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
        # load only these plugins: other installed plugins may warn, and a warning makes a test fail
        command += ["-p", "xdist.plugin", "-p", "pytest_timeout", "--timeout=90", "-n", str(n), "--dist=load"]
        # leave out this test, because it needs a real model, which is not in the pack
        command += ["-k", "not a_real_model_scores"]
        tests = self.manifest["tests"]
        if self.args.small:
            tests = [test for test in tests if "test_signals" in test]
        env = {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "LD_PRELOAD": str(self.work / "cuda_f32.so"),
            "NVIDIA_TF32_OVERRIDE": "0",
            **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")},
        }
        return Part("5", 240, (*command, *tests), tuple(env.items()))

    def _write_model(self, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "lab.benchmarks.random_model", str(self.models / name), "--repeat"]
        command += ["-m", str(self.work / "vocab.gguf"), "--chat-template", str(self.work / "template.jinja")]
        (self.work / "template.jinja").write_text("{{ messages[0].content }}")
        command += (SMALL_MODELS if self.args.small else MODELS)[name].split()
        log = (self.args.out / f"{name}.log").open("wb")
        return subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=log, stderr=log)

    def _model_ready(self, part: Part) -> bool:
        """Wait until a part's model is written. If that fails, add one row for it, and return False."""
        writer = self._writers.get(part.model)
        if writer is None:
            return False
        try:
            code = writer.wait(max(self.deadline - time.monotonic() - 30, 1))
        except subprocess.TimeoutExpired:
            code = 1
        if code:
            del self._writers[part.model]
            writer.kill()
            log = (self.args.out / f"{part.model}.log").read_text(errors="replace")
            self._add({"part": part.name, "what": part.model, "why": f"not written: {log[-TAIL:]}"})
        return not code

    def _run(self, part: Part) -> None:
        left = self.deadline - time.monotonic()
        what = " ".join(word for word in part.command[1:] if not word.startswith("/"))[:60]
        if left < 15:
            self._add({"part": part.name, "what": what, "why": f"no time left ({left:.0f} s)"})
            return
        print(f"[{time.monotonic() - self.started:5.0f} s] {part.name} {what}", file=sys.stderr, flush=True)
        began = time.monotonic()
        limit_s = min(part.limit_s, left - 5)
        log = self.args.out / "log"
        with log.open("ab") as errors:
            errors.write(f"\n== {part.name} {what}\n".encode())
            errors.flush()
            begin = errors.tell()
            lines = Lines([sys.executable, *part.command], {**self.env, **dict(part.env)}, errors, limit_s)
            results = tests_of(lines) if part.name == "5" else rows_of(lines)
            for row in results:
                self._add({"part": part.name, **row})
        took = time.monotonic() - began
        if lines.code:
            tail = log.read_bytes()[begin:].decode("utf-8", "replace").strip()[-TAIL:]
            why = f"ended after {limit_s:.0f} s" if lines.is_late else f"exit status {lines.code}"
            if part.name != "5" or lines.is_late:
                self._add({"part": part.name, "what": what, "why": f"{why}: {tail}"})
        print(f"          took {took:.1f} s", file=sys.stderr, flush=True)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        whole = {"manifest": self.manifest, "arguments": sys.argv[1:], "rows": self.rows}
        part = self.args.out / "gpu-check.json.part"
        part.write_text(json.dumps(whole, indent=0) + "\n")
        part.replace(self.args.out / "gpu-check.json")


def kernel_digest() -> str:
    """Return a digest of the sources from which the kernels are compiled."""
    folder = ROOT / "kvtool"
    files = [path for name in ("engine", "policies") for path in (folder / name).glob("*.py")]
    files = [path for path in files if b"\n@kernel(" in path.read_bytes()]
    digest = hashlib.sha256()
    for path in sorted([*files, *(folder / "kernels").glob("*.*")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def unpack(pack: Path, work: Path, kernels: str) -> dict[str, str]:
    """Unpack the packages into a folder. Return the environment in which kvtool finds them.

    kernels: `kernel_digest` of the packed kernels' sources. If it differs from this checkout's digest, the
    packed kernels are not used.
    """
    site = work / "site"
    for wheel in sorted(pack.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(site)
    for archive in sorted(pack.glob("*.tar.xz")):
        with tarfile.open(archive) as packed:
            packed.extractall(site)
    for name in ("vocab.gguf", "cuda_f32.so"):
        shutil.copy(pack / name, work / name)
    env = dict(os.environ)
    paths = [str(site), str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    env["KVTOOL_CACHE"] = str(work / "cache")
    env["PYTHONUNBUFFERED"] = "1"
    folders = [*cuda_folders(), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    if folders:
        env["LD_LIBRARY_PATH"] = os.pathsep.join(folders)
    # ask kvtool for the path of the kernels, because it depends on the sources, the CPU and the folder
    ask = "from kvtool.system.paths import kernel_library; print(kernel_library())"
    if kernels != kernel_digest():
        print("the packed kernels are of other sources: numba compiles them here", file=sys.stderr)
        return env
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    place = Path(done.stdout.strip())
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(pack / "kernels.so", place)
    return env


def loads(library: str) -> bool:
    """Return True if the dynamic loader finds a library without its folder in LD_LIBRARY_PATH."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def cuda_folders() -> list[str]:
    """Return the folders of CUDA's libraries: for each library, the first folder that has it."""
    folders: dict[str, str] = {}
    names = [name for name in CUDA_LIBRARIES if name != DRIVER or not loads(DRIVER)]
    patterns = list(CUDA_FOLDERS)
    sites = {path for path in sys.path if path.endswith("-packages")}
    sites.add("/opt/torch/.venv/lib/python3*/site-packages")
    patterns += [f"{site}/nvidia/*/lib" for site in sorted(sites)]
    for pattern in patterns:
        for folder in sorted(Path("/").glob(pattern.lstrip("/"))):
            for name in names:
                if (folder / name).exists():
                    folders.setdefault(name, str(folder))
    for name in names:
        if name not in folders:
            print(f"{name} is not in the usual folders", file=sys.stderr)
            command = ["timeout", "20", "find", "/", "-xdev", "-name", name, "-print", "-quit"]
            stdout = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            if stdout:
                folders[name] = str(Path(stdout).parent)
    # put system folders last: other libraries in them could hide the libraries of the remaining folders
    return sorted(dict.fromkeys(folders.values()), key=lambda folder: folder.startswith("/usr/lib"))


class Lines:
    """Lines that a program prints, until it ends or is killed at its time limit.

    Attributes
    ----------
    code
        Exit status of the program. None while it runs.
    is_late
        True if the program was killed at its time limit.
    """

    def __init__(self, command: Sequence[str], env: dict[str, str], errors: Any, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s
        self.code: int | None = None
        self.is_late = False
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._queue.put(line)
        self._queue.put(None)

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                line = self._queue.get(timeout=max(self._end - time.monotonic(), 0.01))
            except queue.Empty:
                self.is_late = True
                break
            if line is None:
                break
            yield line.decode("utf-8", "replace").rstrip()
        if self.is_late:
            # kill the group: this also ends the processes that the program has started
            os.killpg(self._process.pid, 9)
        self.code = self._process.wait()
        self._reader.join()
        assert self._process.stdout
        self._process.stdout.close()


def rows_of(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the rows that a part prints. Each line is a JSON object."""
    for line in lines:
        if line.startswith("{"):
            yield json.loads(line)


def tests_of(lines: Iterable[str]) -> Iterator[Row]:
    """Yield a row for each test that fails, and a row with the number of tests for each outcome."""
    counts: dict[str, int] = {}
    summary = ""
    printed = []
    for line in lines:
        printed.append(line)
        if match := re.search(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\s+(tests/\S.*)", line):
            if line.startswith("["):
                counts[match[1].lower()] = counts.get(match[1].lower(), 0) + 1
                if match[1] in ("FAILED", "ERROR"):
                    yield {"what": match[2], "outcome": match[1].lower()}
            elif match[1] in ("FAILED", "ERROR"):
                yield {"what": match[2][:300], "outcome": "why"}
        elif re.match(r"=+ .* in [0-9.]+s", line):
            summary = line.strip("= ")
    yield {"what": "all", **counts, "summary": summary or "\n".join(printed[-15:])}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Format the results as lines of text, part by part."""
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [row for row in rows if row["part"] == part and not row.get("why")]
        yield f"\n== {part}"
        if part == "2a":
            yield from pivot([row for row in of_part if "us" in row], ("type", "n", "n_kv"), "what", "us")
            errors = [row["error"] for row in of_part if "error" in row]
            wrong = [row for row in of_part if "error" in row and not row["error"] < MAX_ERROR]
            yield f"largest error: {max(errors, default=0):.2g}; wrong results: {wrong or 'none'}"
            refused = [f"{row['what']} {row['type']} n={row['n']}" for row in of_part if not row["supported"]]
            yield f"not supported: {'; '.join(refused) or 'nothing'}"
        elif part == "2c":
            yield from pivot([row for row in of_part if "us" in row], ("type", "nodes", "rows"), "what", "us")
        elif part == "2d":
            for row in of_part:
                times = " ".join(f"{name[3:]} {row[name]:.0f}" for name in row if name.startswith("us_"))
                case = f"{row['what']:9} {row['type']} n={row['n']} archived={row['archived']}"
                yield f"{case}: {times} us a layer"
        elif part == "2e":
            yield from pivot(of_part, ("type", "n_kv"), "what", "us")
        else:
            for row in of_part:
                yield ", ".join(f"{name} {short(value)}" for name, value in row.items() if name not in HIDDEN)
        for row in rows:
            if row["part"] == part and row.get("why"):
                yield f"{row.get('what')}: {row['why'][:600]}"


HIDDEN = ("part", "at_s", "policy", "budget", "flash", "cache_type", "resident", "why")


def short(value: Any) -> str:
    """Format a value in few characters. A dict with a median is shown as this median."""
    if isinstance(value, dict) and "median" in value:
        value = value["median"]
    if isinstance(value, dict):
        return "{" + " ".join(f"{name}={short(each)}" for name, each in value.items()) + "}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def pivot(rows: Sequence[Row], index: Sequence[str], column: str, value: str) -> Iterator[str]:
    """Yield the lines of a table: the heading, then a line for each combination of the fields `index`.

    There is a column for each value of the field `column`. The cells show the field `value`.
    """
    columns = list(dict.fromkeys(row[column] for row in rows))
    yield " ".join([*(f"{name:>7}" for name in index), *(f"{name:>18}" for name in columns)])
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in index), {})[row[column]] = row[value]
    for key, cells in lines.items():
        shown = (f"{cells[name]:18.1f}" if name in cells else " " * 18 for name in columns)
        yield " ".join([*(f"{part!s:>7}" for part in key), *shown])


if __name__ == "__main__":
    main()
