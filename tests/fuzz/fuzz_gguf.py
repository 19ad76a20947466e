"""Run commands on damaged GGUF files, and check how the commands end.

    python -m tests.fuzz.fuzz_gguf --n 2000

The commands are `kvtool models show` and `kvtool generate`. A command must end in time, with one of the
allowed exit codes and at most one line on stderr. One process runs both commands on many files. If it dies, a
new process is started. The number of a file determines its damage, so `--first 17 --n 1 --keep DIR` repeats a
finding.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]

SECONDS = 10
"""Time limit per file in seconds, for both commands together."""

MEMORY = 3 * 2**30
"""Bytes that a worker may allocate after its start.

The limit prevents a damaged length from taking all memory.
"""

EDGES = (*range(5), 31, 255, 4096, 65536, *(2**n - i for n in (31, 32, 63, 64) for i in (0, 1)), 2**40)

KINDS = 4 * ["number"] + 2 * ["small"] + 3 * ["near", "byte"] + 2 * ["data"] + ["cut", "insert", "swap"]

# The exit codes that are allowed for a damaged file. Three of them need a reason: 2 (the context is too small
# for the budget), 6 (the cache or the context is full) and 7 (attention is not finite).
CODES = {0, 2, 3, 4, 6, 7, 8}
CRASHED = {3, 4, 8}


def whole_file(path):
    """Return (bytes of a valid model, (offset, size) of each number in its header, end of its header)."""
    from kvtool.models.gguf import HeaderReader
    from tests import tiny

    if not path.exists():
        tiny.write_llama(
            path, n_layer=1, n_head=2, n_head_kv=1, head_dim=32, n_ff=32, n_vocab=262, n_ctx_train=256
        )
    data = path.read_bytes()

    class Reader(HeaderReader):
        numbers = []

        def _number(self, code):
            self.numbers.append((self.at, struct.calcsize("<" + code)))
            return super()._number(code)

    reader = Reader(path, data)
    reader.header()
    return data, sorted(set(reader.numbers)), reader.at


def damaged(number, data, numbers, end):
    """Return the content of the damaged file with this number.

    data: bytes of a valid model.
    numbers: (offset, size) of each number in its header.
    end: end of its header.
    """
    rng = np.random.default_rng(number)
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.choice(KINDS)
        offset = int(rng.integers(0, end))
        if kind in ("number", "small", "near"):
            offset, size = numbers[rng.integers(len(numbers))]
            value = int(rng.choice(np.array(EDGES, object)) if kind == "number" else rng.integers(0, 40))
            if kind == "near":
                value = (
                    int.from_bytes(out[offset : offset + size], "little") * int(rng.choice([1, 2]))
                    + value
                    - 20
                )
            out[offset : offset + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        elif kind == "byte":
            # change a byte at or just after a number, or any byte of the header, for example in a name
            near = numbers[rng.integers(len(numbers))][0] if rng.integers(2) else offset
            out[near + int(rng.integers(8))] = int(rng.integers(256))
        elif kind == "cut":
            del out[int(rng.integers(4, len(out))) if rng.integers(2) else offset :]
        elif kind == "insert":
            out[offset:offset] = rng.bytes(int(rng.integers(1, 64)))
        elif kind == "swap":
            a, b = sorted(int(numbers[i][0]) for i in rng.integers(0, len(numbers), 2))
            n = int(rng.integers(1, 40))
            out[a : a + n], out[b : b + n] = out[b : b + n], out[a : a + n]
        else:
            weird = struct.pack("<f", rng.choice([np.nan, np.inf, -np.inf, 3e38, 1e-42]))
            offset = end + 4 * int(rng.integers(0, (len(data) - end) // 4))
            out[offset : offset + 4] = weird
        if len(out) < end:
            break
    return bytes(out)


def serve():
    """Read paths from stdin. For each path, run both commands and write "CODE CODE" to stdout.

    The commands' stderr is written to path.err.
    """
    import resource

    from kvtool.cli import app

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    requests = os.fdopen(os.dup(0))
    os.dup2(nowhere, 1)
    # stdin must be empty, or generate would read the paths as piped input
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in requests:
        path = line.rstrip("\n")
        errors = os.open(path + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(errors, 2)
        os.close(errors)
        codes = []
        for command in (["models", "show", path], ["generate", "--raw", "-m", path, *GENERATE]):
            try:
                app(command, prog_name="kvtool")
            except SystemExit as end:
                codes.append(end.code or 0)
            sys.stderr.write("\0")
            sys.stderr.flush()
        answers.write(f"{codes[0]} {codes[1]}\n")


GENERATE = ["-p", "Hello,hello.", "-n", "3", "--temp", "0", "-t", "1", "-c", "64", "--policy", "streamingllm"]


class Worker:
    def __init__(self):
        self.process = None

    def close(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None

    def run(self, path):
        """Return (codes, died) for a file.

        codes: exit codes of the commands, or () if the process died or hung.
        died: exit status of the process, "hang", or None if the process still runs.
        """
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.fuzz_gguf", "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                env=os.environ | {"KVTOOL_MODEL": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                bufsize=0,
            )
            seconds = 60
        else:
            seconds = SECONDS
        self.process.stdin.write(f"{path}\n".encode())
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                self.close()
                return (), "hang"
        answer = self.process.stdout.readline()
        if answer:
            return tuple(map(int, answer.split())), None
        died = self.process.wait()
        self.close()
        return (), died


def verdict(codes, died, outputs):
    """Return the fault, or "" if there is none.

    codes, died: see `Worker.run`.
    outputs: stderr of each command.
    """
    if died == "hang":
        return f"no end within {SECONDS} s"
    if died is not None and died not in CRASHED:
        return f"the process ended with {died}"
    if not set(codes) <= CODES:
        return f"exit codes {codes}"
    # if a file still works, generate stops after -n tokens and prints a line
    outputs = [re.sub(r"^stopped after .*\n", "", part) for part in outputs]
    for part in outputs:
        lines = part.splitlines()
        if len(lines) > 1 or any(not line.startswith("kvtool: ") for line in lines):
            return "more than one line, or not kvtool's"
    for code, part in zip(codes, outputs, strict=False):
        if bool(part) != bool(code):
            return f"exit code {code} with {'a' if part else 'no'} line"
    if died is not None and not outputs[-1]:
        return f"the process ended with {died} and no line"
    return ""


def run(n, first=0, keep=None):
    """Try n files. Return (Counter of outcomes, [(number, fault, stderr), ...])."""
    outcomes, faults = Counter(), []
    worker = Worker()
    with tempfile.TemporaryDirectory() as folder:
        whole = whole_file(Path(folder) / "whole.gguf")
        path = Path(folder) / "damaged.gguf"
        try:
            for number in range(first, first + n):
                path.write_bytes(damaged(number, *whole))
                codes, died = worker.run(path)
                text = Path(f"{path}.err").read_text(errors="replace")
                stderrs = text.split("\0")
                outcome = "crash, exit code" if died is not None else "models show, generate:"
                outcome += f" {died}" if died is not None else " {}, {}".format(*codes)
                outcomes[outcome] += 1
                if wrong := verdict(codes, died, stderrs[: len(codes)] if codes else stderrs):
                    faults.append((number, wrong, text))
                if keep and (n == 1 or wrong):
                    Path(keep).mkdir(parents=True, exist_ok=True)
                    (Path(keep) / f"{number}.gguf").write_bytes(path.read_bytes())
                    (Path(keep) / f"{number}.err").write_text(text)
                Path(f"{path}.err").unlink()
        finally:
            worker.close()
    return outcomes, faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=2000, help="how many files")
    parser.add_argument("--first", type=int, default=0, help="the first one's number")
    parser.add_argument("--keep", help="a folder for what was found")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    outcomes, faults = run(args.n, args.first, args.keep)
    for outcome, count in outcomes.most_common():
        print(f"{count:6} {outcome}")
    for number, wrong, text in faults:
        print(f"file {number}: {wrong}: {text[:400]!r}")
    print(f"{args.n} files, {len(faults)} findings")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
