"""Run tests many times, and report which of them fail by chance.

    python -m tests.tools.repeat -n 30
    python -m tests.tools.repeat -n 30 --busy 2 tests/serve/test_serve_faults.py

Each round runs pytest once for every file. By default, the program runs the test files that start processes,
with subprocess, multiprocessing or a helper of the tests. The output of each failed run is kept in
build/chance. The exit status is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTS = re.compile(r"\b(?:subprocess|multiprocessing|forked|rpc_server|serving|Terminal)\b")


def starting():
    """Return the test files that start processes."""
    return [path for path in sorted(ROOT.glob("tests/*/test_*.py")) if STARTS.search(path.read_text())]


def failed(path, options, keep):
    """Run the tests of a file. Return the names of failed tests, or the exit status if pytest itself failed.

    keep: path to which the output of a run with failures is written.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", *options, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    names = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    # exit status 5 of pytest means that no test of this file matches -k
    if done.returncode not in (0, 5) and not names:
        names = [f"{path.name}: exit status {done.returncode}"]
    if names:
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_text(done.stdout)
    return names


def busy(stack, n):
    """Keep n CPU cores busy until the ExitStack `stack` closes."""
    for _ in range(n):
        process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(process.wait)
        stack.callback(process.kill)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="test files; default: all that start processes")
    parser.add_argument("-n", type=int, default=30, help="rounds")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that keep cores busy")
    parser.add_argument("-k", default="", help="run only tests that match, as pytest's -k")
    args = parser.parse_args()
    files, options = args.files or starting(), ["-k", args.k] if args.k else []
    counts, n_run = Counter(), 0
    with ExitStack() as stack:
        busy(stack, args.busy)
        for i in range(args.n):
            for path in files:
                start = time.monotonic()
                keep = ROOT / "build" / "chance" / f"{path.stem}-{time.time_ns()}.txt"
                names = failed(path, options, keep)
                n_run += 1
                counts.update(names)
                what = f"FAILED {' '.join(names)}, see {keep}" if names else "passed"
                print(f"{i + 1}: {path.name} {time.monotonic() - start:.0f} s {what}", flush=True)
    print(f"{n_run} runs of {len(files)} files, {args.busy} busy processes, {sum(counts.values())} failures")
    for name, n in counts.most_common():
        print(f"{n} x {name}")
    return bool(counts)


if __name__ == "__main__":
    sys.exit(main())
