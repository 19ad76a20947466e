"""Measure time to the first token and memory of a chat; compare with llama-cpp-python's class Llama.

    python -m lab.benchmarks.start --policy buzz --budget 512

`kvtool chat` takes turns with a script that creates a Llama with --budget cells and answers the same prompt.
Each run is a new process. The class Llama comes from the sources from which kvtool builds llama.cpp, and it
loads the same library.

Time is the time from the start of the process to the first byte of the reply. Memory is the peak of resident
memory. It is measured for the chat, and for a process that only imports the modules. kvtool's chat has about
--tokens tokens: more than its budget, so that it evicts. The Llama cannot evict, so its chat has one turn.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from kvtool.build.sources import Upstream, archive, patches_dir
from kvtool.llama.libllama.bindings import library_path
from lab.benchmarks.common import (
    add_common,
    add_plot,
    console,
    describe,
    load_model,
    machine,
    make_parser,
    note,
    plot_ratios,
    show,
    spread,
    spread_of_ratios,
    write_json,
)

PROMPT = "What is a tide, and why are there two of them a day?"
N_REPLY = 64

STOCK = """
import sys
from llama_cpp import Llama
path, n_ctx, n_threads, n_reply, prompt = sys.argv[1:]
n_threads = int(n_threads)
model = Llama(path, n_ctx=int(n_ctx), n_threads=n_threads, n_threads_batch=n_threads, verbose=False)
chat = [{"role": "user", "content": prompt}]
for part in model.create_chat_completion(chat, max_tokens=int(n_reply), temperature=0, stream=True):
    sys.stdout.write(part["choices"][0]["delta"].get("content", ""))
    sys.stdout.flush()
"""

IMPORTS = {
    "stock": "import llama_cpp; print(1)",
    "kvtool": (
        "import kvtool.cli, kvtool.engine.loop, kvtool.chats.conversation, kvtool.policies.{}; print(1)"
    ),
}


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser, needs_file=False)
    add_plot(parser)
    parser.add_argument("--policy", default="buzz")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=900, help="length of kvtool's chat, about")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    model = load_model(args.model)
    path, n_threads = str(model.path), str(args.threads)
    model.close()
    options = ["--policy", args.policy, "--budget", str(args.budget), "-t", n_threads, "--temp", "0"]
    commands = {
        "stock": ["-c", STOCK, path, str(args.budget), n_threads, str(N_REPLY), PROMPT],
        "kvtool": ["-m", "kvtool", "chat", "-m", path, *options, "-n", str(N_REPLY)],
    }
    n_turn = {"stock": 1, "kvtool": max(args.tokens // (N_REPLY + len(PROMPT) // 4), 1)}
    taken: dict[str, dict[str, list[float]]] = {name: {"s": [], "mib": []} for name in commands}
    imports = {name: _run(["-c", text.format(args.policy)])[1] for name, text in IMPORTS.items()}
    # do not count the first round, which fills caches of the system
    for i in range(args.rounds + 1):
        for name, command in commands.items():
            first, most = _run(command, n_turn[name])
            if i > 0:
                taken[name]["s"].append(first)
                taken[name]["mib"].append(most)
        note(f"round {i} of {args.rounds}")
    ratio = spread_of_ratios(taken["kvtool"]["s"], taken["stock"]["s"])
    results: dict[str, object] = {"machine": machine(), "first_token": ratio}
    table = Table(title=f"first token and memory, {args.policy}, {args.budget} cells")
    for column in ("", "first token, s", "over stock", "resident, MiB", "of it imports"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, values in taken.items():
        results[name] = {
            "first_token_s": spread(values["s"]),
            "peak_mib": statistics.median(values["mib"]),
            "imports_mib": imports[name],
        }
        over = show(ratio, 2) if name == "kvtool" else ""
        table.add_row(
            name,
            show(spread(values["s"]), 2),
            over,
            f"{statistics.median(values['mib']):.0f}",
            f"{imports[name]:.0f}",
        )
    console(120).print(table)
    print(describe(results["machine"]))
    write_json(args.json, results)
    plot_ratios(args.plot, "time to the first token over stock's", {args.policy: ratio}, 1.3)


def _run(command: list[str], n_turn: int = 1) -> tuple[float, float]:
    """Run a chat of n_turn turns. Return seconds to the first byte on stdout, and the peak resident MiB."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdin.write((PROMPT.encode() + b"\n") * n_turn)
    process.stdin.close()
    process.stdout.read(1)
    seconds, most = time.perf_counter() - start, 0.0
    while True:
        most = max(most, _resident(process.pid))
        if not process.stdout.read(1):
            break
    stderr = process.stderr.read()
    if process.wait():
        sys.exit(stderr.decode())
    return seconds, most


@contextmanager
def _llama_cpp() -> Iterator[None]:
    """In the block, let new processes import llama-cpp-python's package with kvtool's library."""
    upstream = Upstream.read(patches_dir())
    with (
        tempfile.TemporaryDirectory() as folder,
        tarfile.open(archive(upstream, Path(folder, "log"))) as packed,
    ):
        root = f"{upstream.package.replace('-', '_')}-{upstream.version}"
        packed.extractall(folder, [each for each in packed if each.name.startswith(f"{root}/llama_cpp/")])
        os.environ |= {"PYTHONPATH": f"{folder}/{root}", "LLAMA_CPP_LIB_PATH": str(library_path().parent)}
        yield


def _resident(pid: int) -> float:
    """Return the peak resident MiB of a process so far, or 0 after its end. This works only on Linux."""
    # do not use wait4: it would report at least the memory of this process, because a child starts as a copy
    # of it
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    with _llama_cpp():
        main()
