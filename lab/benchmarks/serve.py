"""Measure a chat of many turns over the OpenAI API: time to the first token, speed and memory per turn.

    python -m lab.benchmarks.serve BOOK --same -- kvtool serve --policy h2o --budget 512 --port 8123
    python -m lab.benchmarks.serve BOOK --chats 2 -- kvtool serve --budget 512 --port 8123 -t 1
    python -m lab.benchmarks.serve BOOK -- python -m llama_cpp.server --model M.gguf --port 8123

The command after -- starts a server at http://127.0.0.1:8123/v1. The user's messages are parts of the book.
Every request has the whole chat, as usual with this API. At the first error, the program prints it and stops.

With --chats, several chats take turns: each request continues another chat. With --same, `kvtool chat` gets
the same turns afterwards, and its replies must be the same. This is not so with recall, because only
`kvtool chat` then pins the system prompt.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.benchmarks.common import machine, make_parser, note, write_json
from lab.benchmarks.servers import answers, pieces, post

PORT = 8123
URL = f"http://127.0.0.1:{PORT}"
SYSTEM = "You read a book with its reader."


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("file", type=Path, help="a book")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--words", type=int, default=190, help="of the book, in each turn")
    parser.add_argument("-n", type=int, default=16, help="tokens of each reply")
    parser.add_argument("--chats", type=int, default=1, help="that take turns")
    parser.add_argument("--same", action="store_true", help="compare the replies with those of kvtool chat")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("command", nargs="+", help="starts the server")
    args = parser.parse_args()
    words = args.file.read_text(encoding="utf-8").split()
    parts = [" ".join(words[i * args.words : (i + 1) * args.words]) for i in range(args.turns)]
    # check that the port is free, because another program on it would answer instead of the server
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", PORT))
    server = subprocess.Popen(args.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        if not answers(server, URL):
            sys.exit("the server does not answer")
        rows = _chat(server.pid, parts, args)
    finally:
        server.kill()
        server.wait()
    table = Table(title=" ".join(args.command))
    for column in ("turn", "tokens", "read", "first token, ms", "tokens/s", "resident MiB", "forgotten"):
        table.add_column(column, justify="right")
    shown = {2, 5, 10, 20, 50, args.turns}
    for row in rows:
        if row["turn"] in shown or row is rows[-1]:
            table.add_row(*(_cell(row.get(name)) for name in _COLUMNS))
    Console(width=110).print(table)
    late = [row["first_ms"] for row in rows[len(rows) // 2 :]]
    print(f"{len(rows)} turns; first token in the second half: median {statistics.median(late):.0f} ms")
    if args.same:
        print("kvtool chat says", "the same" if _same(parts, rows, args) else "SOMETHING ELSE")
    if args.json:
        write_json(args.json, {"machine": machine(), "command": args.command, "rows": rows})


_COLUMNS = ("turn", "tokens", "read", "first_ms", "per_s", "rss", "forgotten")


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:,.0f}" if isinstance(value, float) else f"{value:,}"


def _chat(pid: int, parts: list[str], args: argparse.Namespace) -> list[dict[str, object]]:
    chats = [[{"role": "system", "content": SYSTEM}] for _ in range(args.chats)]
    rows: list[dict[str, object]] = []
    for turn, part in enumerate(parts, 1):
        messages = chats[turn % args.chats]
        messages.append({"role": "user", "content": part})
        try:
            row, reply = _turn(messages, args.n)
        except (urllib.error.HTTPError, _Refused) as error:
            message = error.read().decode() if isinstance(error, urllib.error.HTTPError) else str(error)
            print(f"turn {turn}: {message[:300]}")
            break
        messages.append({"role": "assistant", "content": reply})
        rows.append({"turn": turn, **row, "rss": _rss(pid), "reply": reply})
        note(f"turn {turn}: {row['first_ms']:.0f} ms")
    return rows


def _same(parts: list[str], rows: list[dict[str, object]], args: argparse.Namespace) -> bool:
    """Return True if `kvtool chat` gives the same replies as `kvtool serve` gave."""
    options = args.command[args.command.index("serve") + 1 :]
    if "--port" in options:
        at = options.index("--port")
        options = options[:at] + options[at + 2 :]
    more = ["--system", SYSTEM, "-n", str(args.n), "--temp", "0"]
    command = [args.command[0], "chat", *options, *more]
    done = subprocess.run(
        command, input="\n".join(parts[: len(rows)]), capture_output=True, text=True, check=True
    )
    return done.stdout == "".join(f"{row['reply']}\n" for row in rows)


class _Refused(Exception):
    """Raised if a stream has an error or no text."""


def _turn(messages: list[dict[str, str]], n: int) -> tuple[dict[str, object], str]:
    body = {"messages": messages, "max_tokens": n, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    start, first, reply, n_piece, last = time.perf_counter(), 0.0, "", 0, {}
    with post(f"{URL}/v1/chat/completions", body) as stream:
        for piece in pieces(stream):
            if "error" in piece:
                raise _Refused(json.dumps(piece["error"]))
            last |= {name: piece[name] for name in ("usage", "kvtool", "timings") if piece.get(name)}
            text = piece["choices"][0]["delta"].get("content") if piece["choices"] else None
            if text:
                first = first or time.perf_counter()
                reply += text
                n_piece += 1
    if not n_piece:
        # llama_cpp.server ends a stream in this way when the chat is longer than its context
        raise _Refused("an empty stream")
    end = time.perf_counter()
    usage = last.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {
        "tokens": usage.get("total_tokens"),
        "read": usage.get("prompt_tokens", 0) - cached if cached is not None else None,
        "first_ms": 1e3 * (first - start),
        "per_s": (n_piece - 1) / (end - first) if n_piece > 1 else None,
        "forgotten": (last.get("kvtool") or {}).get("forgotten"),
    }, reply


def _rss(pid: int) -> float:
    """Resident memory of a process in MiB."""
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    return int(match[1]) / 1024 if match else 0.0


if __name__ == "__main__":
    main()
