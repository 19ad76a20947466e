"""Compare two servers: one writes several answers in joint steps, the other writes them one by one.

    python -m lab.benchmarks.together -m M.gguf --chats 4 --ends 151643,151645 -- --policy recall -t 1

The options after -- are for `kvtool serve`. Two servers take turns: one with --parallel 1, and one with
--parallel N. Each server gets N requests at once, with answers of -n tokens. The first round is not counted.

After that, both servers get requests of a single chat. This shows the cost of --parallel N for a chat that is
alone. The ratios compare CPU time and wall time of the two servers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

from lab.benchmarks.common import machine, make_parser, note, write_json
from lab.benchmarks.servers import answers, post, reserved_port


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("-m", dest="model", default=None)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("-n", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--ends", default="2", help="the tokens that end a turn: 151643,151645 of Qwen2.5")
    parser.add_argument(
        "--words", type=int, default=0, help="words of each prompt more: what lies in the archive"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*")
    args = parser.parse_args()
    results: dict[str, list[list[float]]] = {"several": [], "single": []}
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(2)]
        servers = [
            stack.enter_context(closing(Server(args, port, n)))
            for port, n in zip(ports, (1, args.chats), strict=True)
        ]
        for server in servers:
            server.answer(args.chats, args)
        for i in range(args.rounds):
            for what, n in (("several", args.chats), ("single", 1)):
                took = [server.answer(n, args) for server in servers]
                results[what].append([one / other for one, other in zip(*took, strict=True)])
                note(f"round {i + 1}, {what}: {took[0][0]:.2f} and {took[1][0]:.2f} s of CPU time")
    for what, ratios in results.items():
        cpu, wall = (statistics.median(each) for each in zip(*ratios, strict=True))
        n = args.chats if what == "several" else 1
        print(f"{n} at once: {cpu:.2f} times as fast by CPU time, {wall:.2f} by the clock")
    if args.json:
        write_json(args.json, {"machine": machine(), "options": args.options, "ratios": results})


class Server:
    """A server that writes up to n answers at once."""

    def __init__(self, args: argparse.Namespace, port: int, n: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        model = ["-m", args.model] if args.model else []
        command = [sys.executable, "-m", "kvtool", "serve", *model, "--port", str(port), "--parallel", str(n)]
        self._process = subprocess.Popen(
            [*command, *args.options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if not answers(self._process, self.url):
            self.close()
            sys.exit("the server does not answer")

    def answer(self, n: int, args: argparse.Namespace) -> tuple[float, float]:
        """Let the server answer n chats. Return the seconds of CPU time and of wall time."""
        cpu, started = self._cpu_s(), time.perf_counter()
        with ThreadPoolExecutor(n) as pool:
            texts = list(pool.map(lambda i: self._ask(i, args), range(n)))
        assert all(texts)
        return self._cpu_s() - cpu, time.perf_counter() - started

    def _ask(self, i: int, args: argparse.Namespace) -> str:
        text = (
            f"Tell me story number {i} of the sea. "
            + "The sea is wide and deep, and its stories are long. " * (args.words // 11)
        )
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": args.n,
            "temperature": 0,
            # ban the end tokens, so that all answers have the same length
            "logit_bias": {token: -100 for token in args.ends.split(",")},
        }
        answer = json.load(post(f"{self.url}/v1/chat/completions", body))
        return str(answer["choices"][0]["message"]["content"])

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


if __name__ == "__main__":
    main()
