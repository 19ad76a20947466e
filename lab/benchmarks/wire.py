"""Count the bytes per token to a worker and back, for stock llama.cpp and for policies.

    python -m lab.benchmarks.wire wiki.test.raw --budget 512 --tokens 64

All layers are on one worker on loopback. A proxy between kvtool and the worker counts bytes. Stock is the
same library with nothing of kvtool enabled. Before the tokens are counted, its cache is full except for the
cells that these tokens take. The cache of a policy has reached its budget before counting starts, so that the
policy plans every --evict-every tokens. A policy may have options (recall:exact=512).

The bytes beyond stock are shown per plan and by kind. `signals` are sent from the worker to kvtool. `edits`
are sent to the worker: they say which cells move. `graphs` are llama.cpp's graphs, which are sent unless the
worker already has them. `bound` is four bytes times rows times cells, for each signal that the policy reads.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.libllama.workers import add_rpc
from kvtool.llama.loaded.model import Model
from kvtool.policy import PER_CELL, Signal
from lab.benchmarks.common import (
    add_common,
    describe,
    load_model,
    load_tokens,
    machine,
    make_parser,
    note,
    write_json,
)
from lab.benchmarks.servers import reserved_port

STOCK = "stock"

COMMANDS = {6: "set", 8: "get", 9: "copy", 10: "graph", 16: "graph", 5: "clear", 17: "clear"}
"""Kinds of the protocol's commands that are sent for a token or a plan, by command number.

Command 16 computes the last graph again.
"""


class Meter:
    """A proxy in front of a worker.

    Attributes
    ----------
    sent
        Bytes to the worker, by kind of command.
    received
        Bytes from the worker, by kind of command.
    """

    def __init__(self, worker: str) -> None:
        host, port = worker.split(":")
        self.worker = host, int(port)
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._kind = "other"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def read(self) -> tuple[Counter[str], Counter[str]]:
        return self.sent.copy(), self.received.copy()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            worker = socket.create_connection(self.worker)
            for each in (client, worker):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=self._back, args=(worker, client), daemon=True)
            back.start()
            # serve one client at a time, like the worker
            self._forth(client, worker)
            back.join()
            client.close()
            worker.close()

    def _forth(self, client: socket.socket, worker: socket.socket) -> None:
        """Count the bytes of requests: 1 byte for a command, 8 bytes for a size, and `size` bytes of data."""
        head, n_left = b"", 0
        while data := _receive(client):
            # count before sending, because an answer is counted under the kind of the newest request
            view = memoryview(data)
            while view:
                if n_left:
                    n = min(n_left, len(view))
                    self.sent[self._kind] += n
                    n_left, view = n_left - n, view[n:]
                    continue
                part = view[: 9 - len(head)]
                head, view = head + bytes(part), view[len(part) :]
                if len(head) == 9:
                    self._kind = COMMANDS.get(head[0], "other")
                    self.sent[self._kind] += len(head)
                    head, n_left = b"", int.from_bytes(head[1:], "little")
            worker.sendall(data)
        _shut(worker)

    def _back(self, worker: socket.socket, client: socket.socket) -> None:
        """Count the bytes of answers.

        An answer belongs to the newest request, because a client sends one request at a time.
        """
        while data := _receive(worker):
            self.received[self._kind] += len(data)
            client.sendall(data)
        _shut(client)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(2**20)
    except OSError:
        return b""


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


@contextmanager
def worker(threads: int) -> Iterator[str]:
    """Start a worker on loopback; yield its endpoint, and kill the worker at the end of the block."""
    with reserved_port() as port:
        command = [sys.executable, "-m", "kvtool", "worker", "--port", str(port), "-t", str(threads)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            line = process.stderr.readline()
            if "serving" not in line:
                sys.exit(f"the worker did not start: {line.strip()}")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def measure(meter: Meter, name: str, steps: Iterator[None]) -> dict:
    """Decode single tokens. Return the number of bytes per token, by kind."""
    before = meter.read()
    n = sum(1 for _ in steps)
    after = meter.read()
    sent, received = (
        {kind: count / n for kind, count in (new - old).items()}
        for new, old in zip(after, before, strict=True)
    )
    note(f"{name}: {n} tokens, {sum(sent.values()) + sum(received.values()):,.0f} bytes a token")
    return {"policy": name, "tokens": n, "sent": sent, "received": received}


def measure_stock(meter: Meter, model: Model, tokens: np.ndarray, args: argparse.Namespace) -> dict:
    n_fill = args.budget - args.tokens
    context = Decoder(model, args.budget, args.budget, flash=args.flash, n_threads=args.threads)
    try:
        context.decode(tokens[:n_fill], 0, 1)
        context.logits()

        def steps(n: int) -> Iterator[None]:
            for at in range(n_fill, n_fill + n):
                context.decode(tokens[at : at + 1], at, 1)
                context.logits()
                yield

        # do not count the first token, which builds the graph of single tokens
        sum(1 for _ in steps(1))
        context.remove(n_fill, n_fill + 1)
        return measure(meter, STOCK, steps(args.tokens))
    finally:
        context.close()


def measure_policy(
    meter: Meter, model: Model, spec: str, tokens: np.ndarray, args: argparse.Namespace
) -> dict:
    name, *options = spec.split(":")
    policy = policies.fit(name, args.budget, args.evict_every, options)
    settings = Settings(n_batch=args.evict_every, over_budget=False, flash=args.flash, n_threads=args.threads)
    engine = Engine(model, policy, settings)
    try:
        n_fill = args.budget + 2 * args.evict_every
        engine.read(tokens[:n_fill])
        n_plan, evict = 0, engine.evict

        def counted() -> None:
            nonlocal n_plan
            n_plan += 1
            evict()

        engine.evict = counted

        def steps(is_done: Callable[[int], bool]) -> Iterator[None]:
            # end at a plan, because only whole periods between plans must be counted; some policies plan
            # seldom
            n = 0
            while engine.n_until_plan > 0 or not is_done(n):
                at = n_fill + n % args.tokens
                engine.step(tokens[at : at + 1])
                engine.context.logits()
                n += 1
                yield

        # the first step of one token builds its graph, so decode some tokens before the measurement
        sum(1 for _ in steps(lambda n: n > 0))
        n_plan = 0
        result = measure(meter, spec, steps(lambda n: n >= args.tokens))
        return result | {
            "n_plan": n_plan,
            "n_signal": sum(signal in policy.reads for signal in PER_CELL),
            "reads_keys": Signal.KEYS in policy.reads,
            "rows": engine.context.n_row,
            "cells": engine.context.n_cell,
        }
    finally:
        engine.close()


def against_stock(rows: list[dict]) -> None:
    """Add to each row the bytes per plan beyond stock, by kind, and the bound."""
    stock = rows[0]
    for row in rows[1:]:
        every = row["tokens"] / row["n_plan"]

        def beyond(way: str, kind: str, row: dict = row, every: float = every) -> float:
            return every * (row[way].get(kind, 0) - stock[way].get(kind, 0))

        ways = ("sent", "received")
        row["beyond_stock_a_plan"] = {
            "signals": beyond("received", "get"),
            "edits": beyond("sent", "set"),
            "graphs": beyond("sent", "graph"),
            "all": every * sum(sum(row[way].values()) - sum(stock[way].values()) for way in ways),
        }
        row["bound"] = 4 * row["rows"] * row["cells"] * row["n_signal"]


def show(rows: list[dict]) -> None:
    table = Table(box=None, pad_edge=False)
    columns = ("policy", "bytes a token to it", "from it", "tokens a plan", "beyond stock a plan")
    columns += ("signals", "bound")
    for column in (*columns, "edits", "graphs"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        cells = [row["policy"], *(f"{sum(row[way].values()):,.0f}" for way in ("sent", "received"))]
        if beyond := row.get("beyond_stock_a_plan"):
            cells += [
                f"{row['tokens'] / row['n_plan']:.0f}",
                f"{beyond['all']:,.0f}",
                f"{beyond['signals']:,.0f}",
                f"{row['bound']:,}",
            ]
            cells += [f"{beyond[kind]:,.0f}" for kind in ("edits", "graphs")]
        table.add_row(*cells)
    Console(width=140).print(table, highlight=False)


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--policies", default="streamingllm,h2o,buzz,weightedkv,bumblebee,recall")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--evict-every", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="tokens that are counted")
    parser.add_argument("--flash", default="auto", choices=("auto", "on", "off"))
    args = parser.parse_args()
    with worker(args.threads) as endpoint:
        meter = Meter(endpoint)
        add_rpc(meter.endpoint)
        model = load_model(args.model)
        tokens = load_tokens(model, args.file, args.budget + 3 * args.evict_every + args.tokens)
        rows = [measure_stock(meter, model, tokens, args)]
        rows += [measure_policy(meter, model, spec, tokens, args) for spec in args.policies.split(",")]
        # call `machine` before the worker ends, because it asks the worker for the size of its memory
        what = machine() | {
            name: getattr(args, name) for name in ("budget", "evict_every", "tokens", "flash")
        }
        model.close()
        meter.close()
    against_stock(rows)
    note(describe(what))
    show(rows)
    write_json(args.json, what | {"rows": rows})


if __name__ == "__main__":
    main()
