"""Send sessions of coding agents to several servers; measure tokens read and time to the first token.

    python -m lab.benchmarks.agents -m M.gguf --llama-server build/bin/llama-server \\
        --llama-cpp venv/bin/python

data/agents.jsonl.xz has the requests of opencode and Qwen Code. They were recorded with a scripted model.
In each session, the agent reads, writes and edits files, and then gets a second question.

Before a request is sent, its recorded replies are replaced by the server's own replies, as in a real chat.
With logit_bias, every server writes the same text, so all servers get the same prompts. This text has no tool
calls, so tool results are sent as messages of the user. With --recorded, requests are sent unchanged, and the
server reads replies that it did not write.

The server is restarted before the last request. Then the last request is sent again with one change in the
middle of its messages. After that, a new server gets the requests of two agents in turns.

kvtool keeps its chats with --sessions. llama-server keeps them with --slot-save-path: this program asks it to
save and restore them. The time for saving and restoring is not measured. llama_cpp.server keeps nothing and
has no /v1/messages. --llama-cpp is the path of a Python with llama_cpp.server; set LLAMA_CPP_LIB_PATH so that
it uses the same llama.cpp.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lab.benchmarks.common import load_model, machine, make_parser, note, write_json
from lab.benchmarks.servers import answers, pieces, post, reserved_port

SESSIONS = Path(__file__).parent / "data" / "agents.jsonl.xz"
MESSAGES = "/v1/messages"
N_SLOT = 4
"""Number of slots that llama-server has by default."""

Json = dict[str, object]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("-m", "--model", required=True, help="a path")
    parser.add_argument("--llama-server", help="its program")
    parser.add_argument("--llama-cpp", help="a Python that has llama_cpp.server")
    parser.add_argument(
        "--kvtool", action="append", help='options of kvtool serve; "--kvtool=A --kvtool=B" tries two servers'
    )
    parser.add_argument("--recorded", action="store_true", help="send the answers that were recorded")
    parser.add_argument("--without-kvtool", action="store_true", help="the others alone")
    parser.add_argument("--only", default="", help="agents whose names have this")
    parser.add_argument("-c", "--n-ctx", default="65536", help="of the others")
    parser.add_argument("-t", "--threads", default="1")
    parser.add_argument("-n", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--long", type=Path, help="a text, which one more message has before a restart")
    parser.add_argument("--words", type=int, default=10000, help="of that text")
    parser.add_argument("--json", type=Path, help="write each turn to this file")
    args = parser.parse_args()
    args.bias = {str(load_model(args.model).tokenize(" yes")[-1]): 100}
    sessions: dict[str, list[Json]] = {}
    with lzma.open(SESSIONS, "rt", encoding="utf-8") as lines:
        for request in map(json.loads, lines):
            sessions.setdefault(request.pop("client"), []).append(request)
    rows: list[Json] = []
    names = list(sessions)
    for i, agent in enumerate(names):
        if args.only.lower() not in agent.lower():
            continue
        other = sessions[names[(i + 1) % len(names)]]
        for server in _servers(args):
            for row in _replay(server, sessions[agent], other, args):
                rows.append({"agent": agent, "server": server.name, **row})
                note(" ".join(f"{value}" for value in rows[-1].values()))
                write_json(args.json, {"machine": machine(), "rows": rows})
    Console(width=110).print(_table(rows, args))


class Server:
    """A server that can be started more than once, always on the same port.

    `start` gets the folder for the log and for the chats that the server keeps.
    """

    name, speaks = "", (MESSAGES, "/v1/chat/completions")

    def __init__(self, args: argparse.Namespace, port: int) -> None:
        self.args = args
        self.process: subprocess.Popen[bytes] | None = None
        self.port = str(port)
        self.url = f"http://127.0.0.1:{port}"

    def command(self, folder: Path) -> list[str]:
        raise NotImplementedError

    def start(self, folder: Path) -> None:
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command(folder), stdout=log, stderr=log)
        if not answers(self.process, self.url):
            sys.exit(f"{self.name} does not answer:\n{self.log.read_text()[-2000:]}")
        self.n_log = self.log.stat().st_size

    def stop(self) -> None:
        if self.process:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)

    def restart(self, folder: Path) -> None:
        self.stop()
        self.start(folder)

    def count(self, end: Json) -> tuple[int, int] | None:
        """Return (tokens of the prompt, tokens read), as the server reports them."""
        usage = end.get("usage") or {}
        if "input_tokens" in usage:
            n_read = usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0)
            return n_read + usage["cache_read_input_tokens"], n_read
        n_prompt = usage["prompt_tokens"]
        return n_prompt, n_prompt - usage["prompt_tokens_details"]["cached_tokens"]


class Kvtool(Server):
    def __init__(self, args: argparse.Namespace, port: int, options: str) -> None:
        super().__init__(args, port)
        self.name, self.options = f"kvtool {options}".strip(), options

    def command(self, folder: Path) -> list[str]:
        common = ["--port", self.port, "-t", self.args.threads, "--sessions", str(folder / "chats")]
        options = [*common, *shlex.split(self.options)]
        return [sys.executable, "-m", "kvtool", "serve", "-m", self.args.model, *options]


class LlamaServer(Server):
    name = "llama-server"

    def command(self, folder: Path) -> list[str]:
        common = ["--port", self.port, "-t", self.args.threads, "--slot-save-path", str(folder), "--no-ui"]
        return [self.args.llama_server, "-m", self.args.model, "-c", self.args.n_ctx, *common]

    def restart(self, folder: Path) -> None:
        self._slots("save")
        super().restart(folder)
        self._slots("restore")

    def _slots(self, action: str) -> None:
        for i in range(N_SLOT):
            try:
                post(f"{self.url}/slots/{i}?action={action}", {"filename": f"{i}.bin"}).close()
            except urllib.error.HTTPError as error:
                note(f"slot {i}: {error.read().decode()[:200]}")


class LlamaCpp(Server):
    name, speaks = "llama_cpp.server", ("/v1/chat/completions",)

    def command(self, folder: Path) -> list[str]:
        threads = ["--n_threads", self.args.threads, "--n_threads_batch", self.args.threads]
        common = ["--model", self.args.model, "--n_ctx", self.args.n_ctx, "--port", self.port, *threads]
        return [self.args.llama_cpp, "-m", "llama_cpp.server", *common]

    def count(self, end: Json) -> tuple[int, int] | None:
        time.sleep(0.5)
        with self.log.open("rb") as log:
            log.seek(self.n_log)
            text = log.read()
        self.n_log += len(text)
        hits = re.findall(rb"(\d+) prefix-match hit, remaining (\d+) prompt", text)
        read = re.findall(rb"prompt eval time =.*?/ +(\d+) tokens", text)
        n_read = int(hits[-1][1]) if hits else int(read[-1]) if read else None
        return None if n_read is None else (n_read + int(hits[-1][0]) if hits else n_read, n_read)


def _servers(args: argparse.Namespace) -> Iterator[Server]:
    for options in [] if args.without_kvtool else args.kvtool or [""]:
        with reserved_port() as port:
            yield Kvtool(args, port, options)
    wanted = {LlamaServer: args.llama_server, LlamaCpp: args.llama_cpp}
    for kind in filter(wanted.get, wanted):
        with reserved_port() as port:
            yield kind(args, port)


def _replay(
    server: Server, requests: list[Json], other: list[Json], args: argparse.Namespace
) -> Iterator[Json]:
    if requests[-1]["path"] not in server.speaks:
        return
    with tempfile.TemporaryDirectory() as name:
        folder, chat = Path(name), Chat(server, args)
        server.start(folder)
        try:
            for i, request in enumerate(requests[:-1]):
                yield {"phase": "turns" if i else "first", **chat.turn(request)}
            server.restart(folder)
            yield {"phase": "restarted", **chat.turn(requests[-1])}
            changed = _edited(requests[-1])
            chat.said.pop()
            yield {"phase": "edited", **chat.turn(changed)}
            if args.long:
                text = " ".join(args.long.read_text(encoding="utf-8").split()[: args.words])
                for phase, question in (("long", text), ("long, restarted", "Go on.")):
                    more = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": question}]
                    changed["body"]["messages"] += more
                    if phase != "long":
                        server.restart(folder)
                    yield {"phase": phase, **chat.turn(changed)}
        finally:
            server.stop()
    if other[-1]["path"] not in server.speaks:
        return
    with tempfile.TemporaryDirectory() as name:
        chats = Chat(server, args), Chat(server, args)
        server.start(Path(name))
        try:
            for pair in zip(requests, other, strict=False):
                for chat, request in zip(chats, pair, strict=True):
                    yield {"phase": "two in turns", **chat.turn(request)}
        finally:
            server.stop()


class Chat:
    """A recorded session that is sent to a server. said: the server's answers so far."""

    def __init__(self, server: Server, args: argparse.Namespace) -> None:
        self.server, self.args = server, args
        self.said: list[str] = []
        self.n_given = 0

    def turn(self, request: Json) -> Json:
        body = request["body"]
        # a request without tools asks for a title: it is not part of the chat
        is_own = bool(body.get("tools"))
        if is_own and not self.said:
            self.n_given = sum(each["role"] == "assistant" for each in body["messages"])
        if is_own and not self.args.recorded:
            body = body | {"messages": self._as_said(body["messages"])}
        row, reply = _turn(self.server, request["path"], body, self.args.n)
        if is_own:
            self.said.append(reply.strip() or "Yes.")
        return row

    def _as_said(self, messages: list[Json]) -> list[Json]:
        given, replies = self.n_given, iter(self.said)
        sent = []
        for message in messages:
            if message["role"] == "assistant":
                given -= 1
                message = message if given >= 0 else {"role": "assistant", "content": next(replies)}
            elif message["role"] == "tool":
                message = {"role": "user", "content": message["content"]}
            elif isinstance(message["content"], list):
                message = message | {"content": [_as_text(part) for part in message["content"]]}
            sent.append(message)
        return sent


def _as_text(part: Json) -> Json:
    if part["type"] != "tool_result":
        return part
    content = part["content"]
    texts = [content] if isinstance(content, str) else [each["text"] for each in content]
    return {"type": "text", "text": "\n".join(texts)}


def _edited(request: Json) -> Json:
    """Return a copy of a request, in which a message in the middle begins with "Changed: "."""
    changed = copy.deepcopy(request)
    messages = changed["body"]["messages"]
    later = messages[len(messages) // 2 :]
    message = next(each for each in later if each["role"] in ("user", "tool"))
    where = message
    while not isinstance(where["content"], str):
        where = where["content"][0]
        if "text" in where:
            where["text"] = f"Changed: {where['text']}"
            return changed
    where["content"] = f"Changed: {where['content']}"
    return changed


def _turn(server: Server, path: str, body: Json, n: int) -> tuple[Json, str]:
    options = {"stream": True, "max_tokens": n, "temperature": 0, "logit_bias": server.args.bias}
    body = body | options
    start, first, end, reply = time.perf_counter(), 0.0, {}, ""
    with post(server.url + path, body) as stream:
        for piece in pieces(stream):
            if "error" in piece:
                sys.exit(f"{server.name}: {piece['error']}")
            # the first event of Anthropic's API has the whole usage; later events may have only the output
            # tokens
            usage = (piece.get("message") or piece).get("usage") or {}
            end["usage"] = end.get("usage", {}) | usage
            texts = [choice["delta"].get("content") for choice in piece.get("choices", ())]
            texts.append(piece.get("delta", {}).get("text"))
            text = "".join(filter(None, texts))
            if text and not first:
                first = time.perf_counter()
            reply += text
    n_prompt, n_read = server.count(end) or (None, None)
    first_s = (first or time.perf_counter()) - start
    return {"tokens": n_prompt, "read": n_read, "first_s": first_s}, reply


def _table(rows: list[Json], args: argparse.Namespace) -> Table:
    table = Table(title=f"{Path(args.model).name}: tokens read, and seconds to the first token")
    servers = list(dict.fromkeys(row["server"] for row in rows))
    for column in ("agent", "phase", "tokens", *servers, *(f"{name}, s" for name in servers)):
        table.add_column(column, justify="left" if column in ("agent", "phase") else "right")
    for agent, phase in dict.fromkeys((row["agent"], row["phase"]) for row in rows):
        group = [row for row in rows if (row["agent"], row["phase"]) == (agent, phase)]
        of = [[row for row in group if row["server"] == name] for name in servers]
        # servers that got equal prompts report equal numbers of tokens: show equal numbers once
        tokens = dict.fromkeys(f"{sum(row['tokens'] for row in each):,}" for each in of if each)
        read = [sum(row["read"] or 0 for row in each) if each else None for each in of]
        took = [sum(row["first_s"] for row in each) if each else None for each in of]
        table.add_row(
            agent, phase, " / ".join(tokens), *("-" if n is None else f"{n:,}" for n in read),
            *("-" if s is None else f"{s:.1f}" for s in took),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
