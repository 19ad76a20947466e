"""How many right calls does a model make to the tools of coding agents, under each policy?

    python -m lab.benchmarks.tools -m M.gguf --policies full,recall@1024,h2o@+1024 --json tools.json

data/tools.jsonl.xz has the first request of each of four agents, with its system prompt and its tools. The
program replaces the user's message by fifty made-up messages, one after the other. They are the same for all
agents, and ask to read, list, search, run or write something. For each agent and policy, a new server is
started. It reads the agent's prompt once. Only the first call of an answer is examined.

A call is valid if the tool exists and the arguments fit its schema (required arguments, types, choices). A
valid call is right if the tool is one of the agent's tools for the task, and the arguments contain the path,
word, command or line of the task. A shell command must also contain a program that does the task.

A policy is NAME, NAME@BUDGET or NAME@+BUDGET. With NAME@+BUDGET, the cells for the pinned system prompt and
tools are added to the budget. All policies are compared with the first policy, request by request (McNemar's
exact test). Requests that the --json file already has are not asked again. With --choice auto, the model
decides whether it calls a tool. With --choice required, a grammar forces a call.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path

from jsonschema import Draft202012Validator, validators
from rich.console import Console
from rich.table import Table

from kvtool.chats.prompt import template_of
from kvtool.llama.loaded.model import Model
from kvtool.models.resolve import resolve
from kvtool.serve.api import requests, responses
from kvtool.serve.rendering import Rendering
from lab.benchmarks.agents import Json, Server
from lab.benchmarks.common import machine, make_parser, mcnemar, note, write_json
from lab.benchmarks.servers import post, reserved_port

REQUESTS = Path(__file__).parent / "data" / "tools.jsonl.xz"
SHOWN = "agent policy kind prompt cached written seconds valid right name arguments"

TASKS = {
    "read": (
        ("Show me what is in the file {file}.", "Read {file}.", "What does {file} say?"),
        ("file",),
        {"read", "read_file", "read_files"},
        r"\b(cat|bat|head|tail|less|more|sed|awk|nl|type)\b",
    ),
    "list": (
        ("List the files in the folder {folder}.", "Which files are there in {folder}?"),
        ("folder",),
        {"list_directory", "glob", "read"},
        r"\b(ls|find|tree|dir|rg --files|fd)\b",
    ),
    "search": (
        ("Search the code for the word {word}.", "Where is {word} used in this project? Search for it."),
        ("word",),
        {"grep", "grep_search", "search_codebase"},
        r"\b(grep|egrep|rg|ag|ack|find)\b",
    ),
    "run": (("Run this command: {command}", "Please run `{command}`."), ("command",), set(), ""),
    "write": (
        ("Create the file {file} with this one line: {line}", "Write a new file {file}. Its text: {line}"),
        ("file", "line"),
        {"write", "write_file", "editor"},
        r">|\btee\b|\bsed\b|apply_patch",
    ),
}
"""For each kind of task: the user's texts, the parts that arguments must contain, the right tools, and a
pattern that a right shell command must match.
"""
SHELLS = {"bash", "run_shell_command", "run_commands", "exec_command"}
FOLDERS = "src lib app core docs scripts config data models services helpers parsers"
NAMES = "orders invoice parser cache routes report schema worker mailer tokens prices export session"
ENDINGS = "py js ts md json toml go rs txt"
WORDS = "load_user parseDate MAX_RETRIES sendMail total_price open_socket TODO RateLimiter isEmpty"
COMMANDS = (
    "pytest -q tests/test_{}.py", "npm run build:{}", "python -m {} --version", "git log --oneline -5 {}",
    "make {}", "cargo test {}", "docker ps --filter name={}", "du -sh {}", "wc -l {}.csv",
)  # fmt: skip
LINES = ("version = {n}", "port: {n}", "print({n})", "limit {n}", "# room {n}")

_CHECKED = (
    *("type", "enum", "const", "anyOf", "oneOf", "items"),
    *("properties", "required", "additionalProperties"),
)
"""Keywords of a schema that `fits` checks. Others, such as minLength, do not make a call invalid."""

_Validator = validators.create(
    {},
    {name: Draft202012Validator.VALIDATORS[name] for name in _CHECKED},
    type_checker=Draft202012Validator.TYPE_CHECKER,
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("-m", "--model", required=True, help="a name of models.txt or a path")
    parser.add_argument("--policies", default="full,recall@1024,h2o@+1024")
    parser.add_argument("--choice", default="required", choices=("auto", "required"))
    parser.add_argument("--only", default="", help="agents whose names have this")
    parser.add_argument("--requests", type=int, default=50, help="of each agent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-n", type=int, default=160, help="the most tokens of an answer")
    parser.add_argument("--kvtool", default="-b 64", help="more options of kvtool serve")
    parser.add_argument("-t", "--threads", default="1")
    parser.add_argument("--json", type=Path, help="write each request to this file, and go on from it")
    args = parser.parse_args()
    args.model = str(resolve(args.model))
    agents = [each for each in _agents(args.model) if args.only.lower() in each["client"].lower()]
    made = make_requests(args.requests, args.seed)
    about = {name: getattr(args, name) for name in ("choice", "seed", "n", "kvtool")}
    about |= {"model": Path(args.model).name, "machine": machine()}
    rows: list[Json] = []
    if args.json and args.json.exists():
        had = json.loads(args.json.read_text())
        rows = had.pop("rows")
        if had | {"machine": about["machine"]} != about:
            sys.exit(f"{args.json} was made with {had}")
    policies = args.policies.split(",")
    for agent, policy in product(agents, policies):
        had = {row["text"] for row in rows if (row["agent"], row["policy"]) == (agent["client"], policy)}
        missing = [each for each in made if each["text"] not in had]
        for row in _run(agent, policy, missing, args) if missing else ():
            rows.append(row)
            write_json(args.json, {**about, "rows": rows})
    Console(width=110).print(table_of(rows, policies, f"{about['model']}, {args.choice}"))


def _agents(model_path: str) -> Iterator[Json]:
    """Yield the recorded requests, each with the schemas of its tools and its number of pinned tokens."""
    model = Model(Path(model_path))
    rendering = Rendering(model, template_of(model))
    with lzma.open(REQUESTS, "rt", encoding="utf-8") as lines:
        for each in map(json.loads, lines):
            is_response = each["path"] == "/v1/responses"
            given = (responses if is_response else requests).as_chat(each["body"])
            chat = requests.check_chat(given, requests.Defaults())
            _, n_pinned = rendering.whole(chat.messages, chat.tools)
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}
            yield each | {"is_response": is_response, "n_pinned": n_pinned, "schemas": schemas}


def make_requests(n: int, seed: int) -> list[Json]:
    """Return n messages of the user. "needs" has the strings that a right call must contain."""
    draws, by_text = random.Random(seed), {}
    while len(by_text) < n:
        kind = list(TASKS)[len(by_text) % len(TASKS)]
        phrases, needs, _, _ = TASKS[kind]
        name, folder = draws.choice(NAMES.split()), draws.choice(FOLDERS.split())
        parts = {
            "file": f"{folder}/{name}_{draws.randrange(100)}.{draws.choice(ENDINGS.split())}",
            "folder": f"{folder}/{name}",
            "word": draws.choice(WORDS.split()),
            "command": draws.choice(COMMANDS).format(name),
            "line": draws.choice(LINES).format(n=draws.randrange(1000, 10000)),
        }
        text = draws.choice(phrases).format(**parts)
        by_text[text] = {"kind": kind, "text": text, "needs": [parts[each] for each in needs]}
    return list(by_text.values())


class Kvtool(Server):
    """A kvtool server for one agent, with one policy."""

    name = "kvtool"

    def __init__(self, args: argparse.Namespace, port: int, policy: str, n_pinned: int) -> None:
        super().__init__(args, port)
        name, _, budget = policy.partition("@")
        if budget.startswith("+"):
            budget = str(n_pinned + int(budget[1:]))
        self.policy = ["--policy", name, *(["--budget", budget] if budget else [])]

    def command(self, folder: Path) -> list[str]:
        arguments = ["-m", self.args.model, "--port", self.port, "-t", self.args.threads, "--parallel", "1"]
        options = [*arguments, *self.policy, *shlex.split(self.args.kvtool)]
        return [sys.executable, "-m", "kvtool", "serve", *options]


def _run(agent: Json, policy: str, messages: list[Json], args: argparse.Namespace) -> Iterator[Json]:
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        server = Kvtool(args, port, policy, agent["n_pinned"])
        server.start(Path(folder))
        try:
            for message in messages:
                start = time.perf_counter()
                body = body_of(agent, message["text"], args.choice, args.n)
                with post(server.url + agent["path"], body) as answer:
                    reply = json.load(answer)
                row = {"agent": agent["client"], "policy": policy, **message, **answer_of(reply)}
                row |= score(row, agent["schemas"]) | {"seconds": round(time.perf_counter() - start, 2)}
                note(" ".join(str(row[name]) for name in SHOWN.split())[:180])
                yield row
        finally:
            server.stop()


def body_of(agent: Json, text: str, choice: str, n: int) -> Json:
    """Return an agent's request, in the API that the agent speaks, with `text` as its last message."""
    body = {**agent["body"], "tool_choice": choice, "temperature": 0}
    if agent["is_response"]:
        message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        return body | {"input": [*body["input"][:-1], message], "max_output_tokens": n}
    return body | {"messages": [*body["messages"][:-1], {"role": "user", "content": text}], "max_tokens": n}


def answer_of(reply: Json) -> Json:
    """Return an answer's first call ("name" and "arguments"), its text, and counts.

    If the answer has no call, name and arguments are None.
    """
    usage, forgotten = reply["usage"], reply["kvtool"]["forgotten"]
    if "output" in reply:
        calls = [item for item in reply["output"] if item["type"] == "function_call"]
        # in the prompt and the schemas a tool is NAMESPACE__NAME, but this API returns the two parts
        # separately
        names = ["__".join(filter(None, (call.get("namespace"), call["name"]))) for call in calls]
        texts = [item["content"][0]["text"] for item in reply["output"] if item["type"] == "message"]
        tokens = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    else:
        message = reply["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        names, texts = [call["name"] for call in calls], [message["content"] or ""]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        tokens = usage["prompt_tokens"], cached, usage["completion_tokens"]
    name, arguments = (names[0], calls[0]["arguments"]) if calls else (None, None)
    counts = dict(zip(("prompt", "cached", "written"), tokens, strict=True)) | {"forgotten": forgotten}
    return {"name": name, "arguments": arguments, "calls": len(calls), "said": "".join(texts), **counts}


def score(row: Json, schemas: Json) -> Json:
    """Return whether a call is "valid" and "right"; the module's docstring defines these words."""
    name = row["name"]
    try:
        arguments = json.loads(row["arguments"] or "")
    except ValueError:
        return {"valid": False, "right": False}
    valid = name in schemas and fits(arguments, schemas[name])
    return {"valid": valid, "right": valid and is_right(row["kind"], row["needs"], name, arguments)}


def fits(value: object, schema: Json) -> bool:
    """Return True if a value fits a schema: types, choices, required properties, no unknown properties."""
    return _Validator(schema).is_valid(value)


def is_right(kind: str, needs: list[str], name: str, arguments: object) -> bool:
    """Return True if a call does the task."""
    texts = list(_texts(arguments))
    if not all(any(need in text for text in texts) for need in needs):
        return False
    _, _, tools, program = TASKS[kind]
    return name in tools or (name in SHELLS and bool(re.search(program, "\n".join(texts))))


def _texts(value: object) -> Iterator[str]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    yield from (value,) if isinstance(value, str) else chain.from_iterable(map(_texts, parts))


def table_of(rows: list[Json], policies: list[str], title: str) -> Table:
    table = Table(title=f"{title}: valid and right calls")
    for column in ("agent", "tokens", "requests", *policies):
        table.add_column(column, justify="left" if column == "agent" else "right")
    # count only requests that were answered with every policy
    by_policy: dict[str, Json] = {policy: {} for policy in policies}
    for row in rows:
        by_policy.get(row["policy"], {})[row["agent"], row["text"]] = row
    first, *others = by_policy.values()
    keys = [key for key in first if all(key in answers for answers in others)]
    for agent in [*dict.fromkeys(agent for agent, _ in keys), "all"]:
        agent_keys = [key for key in keys if agent in (key[0], "all")]
        of = [[policy[key] for key in agent_keys] for policy in by_policy.values()]
        counts = [f"{sum(row['valid'] for row in each)} {sum(row['right'] for row in each)}" for each in of]
        tokens = "" if agent == "all" else f"{min(row['prompt'] for row in of[0]):,}"
        table.add_row(agent, tokens, str(len(agent_keys)), *counts)
    tests = []
    for other in others:
        lost = sum(first[key]["right"] and not other[key]["right"] for key in keys)
        won = sum(other[key]["right"] and not first[key]["right"] for key in keys)
        tests.append(f"-{lost} +{won}, p {mcnemar(lost, won):.2g}")
    table.add_row("right, against the first", "", "", "", *tests)
    return table


if __name__ == "__main__":
    main()
