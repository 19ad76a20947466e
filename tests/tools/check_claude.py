"""Use kvtool serve from Claude Code as a person does: file edits, a tool that fails, interrupts, /compact.

    python -m tests.tools.check_claude build/claude/node_modules/.bin/claude
    python -m tests.tools.check_claude CLAUDE --only edits,resumed --record FILE

The program starts a server with a small random model, and a proxy that dictates the model's answers. It
prints a line per check. The exit status is 1 if a check fails. `make check-claude` installs Claude Code,
which needs Node.js. Nothing is sent to other machines: the key is made up, and the home folder is temporary.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from kvtool.models.resolve import resolve
from tests import tiny
from tests.held import PATIENCE_S, until
from tests.serve.dictating import dictating
from tests.serve.serving import serving

QUIET = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING")
JSON = ("--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")


class User:
    """A user of Claude Code in an empty folder. proxy: replaces Anthropic's server."""

    def __init__(self, claude, proxy, folder):
        self.claude, self.proxy = claude, proxy
        self.work, home = folder / "work", folder / "home"
        self.work.mkdir()
        home.mkdir()
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "IS_SANDBOX": "1"}
        environment |= {"ANTHROPIC_BASE_URL": proxy.url, "ANTHROPIC_API_KEY": "sk-none"}
        environment |= dict.fromkeys(QUIET, "1")
        self.how = {"cwd": self.work, "env": environment, "text": True}

    def asks(self, prompt, *options, replies):
        """Ask Claude Code. Its model answers with these replies.

        Return (its final event, the requests that it sent).
        """
        n, self.proxy.replies = len(self.proxy.asked), list(replies)
        command = [self.claude, "-p", prompt, *JSON, *options]
        how = self.how | {"stdin": subprocess.DEVNULL, "timeout": PATIENCE_S}
        done = subprocess.run(command, **how, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        end = json.loads(done.stdout.splitlines()[-1])
        assert not end["is_error"], end
        assert not self.proxy.replies, end
        return end, self.answered(n)

    def answered(self, n):
        """Return all requests after the first n. Check that all of them were answered."""
        requests = self.proxy.asked[n:]
        assert requests
        assert all(each["status"] == 200 for each in requests), [each["answer"] for each in requests]
        return requests

    def goes_on(self, requests):
        """Check that each request except the first of a chat reads only new tokens."""
        for before, after in zip(requests, requests[1:], strict=False):
            was, now = usage(before), usage(after)
            assert now["cache_read_input_tokens"] >= was["n_all"], (was, now)


def usage(noted):
    """Return the last usage in a streamed answer. Its key n_all is the sum of the other counts.

    If the answer was stopped, its last usage has only the counts of the prompt.
    """
    data = [event.partition(b"data: ")[2] for event in noted["answer"].split(b"\n\n")[:-1]]
    events = [event.get("message", event) for event in map(json.loads, filter(None, data))]
    counts = [event["usage"] for event in events if "usage" in event][-1]
    return counts | {"n_all": sum(counts.values())}


def results(noted):
    """Return the results of tools in the last message of a request."""
    content = next(each for each in reversed(noted["body"]["messages"]) if each["role"] == "user")["content"]
    return [block for block in content if block["type"] == "tool_result"]


def edits(user):
    """The model writes and edits a file; each turn reads new tokens only."""
    path = user.work / "calc.py"
    wrong = {"file_path": str(path), "content": "def add(x, y):\n    return x - y\n"}
    # later requests repeat this call, and Claude Code then adds the default of replace_all. `right` has it
    # from the start, so that the call does not change and is not read again
    right = {"file_path": str(path), "old_string": "x - y", "new_string": "x + y", "replace_all": False}
    end, requests = user.asks(
        "Write calc.py, and mend it.", replies=[("Write", wrong), ("Edit", right), "It adds now."]
    )
    assert end["result"] == "It adds now."
    assert path.read_text() == "def add(x, y):\n    return x + y\n"
    user.goes_on(requests)


def fails(user):
    """The model learns that a tool failed, and continues."""
    gone = {"file_path": str(user.work / "gone.py")}
    end, requests = user.asks(
        "Look.", replies=[("Read", gone), ("Bash", {"command": "exit 3"}), "It is gone."]
    )
    assert end["result"] == "It is gone."
    assert [result["is_error"] for each in requests[1:] for result in results(each)] == [True, True]
    user.goes_on(requests)


def resumed(user):
    """A session can be continued after its end, and its text is not read again."""
    first, one = user.asks("My name is Ada.", replies=["Hello Ada."])
    last, two = user.asks("Who am I?", "--continue", replies=["Ada."])
    again, three = user.asks("Sure?", "--resume", last["session_id"], replies=["Yes."])
    assert first["session_id"] == last["session_id"] == again["session_id"]
    user.goes_on([*one, *two, *three])


def compacted(user):
    """/compact replaces the chat by the model's summary, and the chat continues."""
    user.asks("My name is Ada.", replies=["Hello Ada."])
    user.asks("I write games.", "--continue", replies=["I see."])
    text = "<analysis>\nShort.\n</analysis>\n\n<summary>\nThe user is called Ada.\n</summary>"
    user.asks("/compact", "--continue", replies=[text])
    end, requests = user.asks("Who am I?", "--continue", replies=["You are Ada."])
    assert end["result"] == "You are Ada."
    assert "The user is called Ada." in json.dumps(requests[-1]["body"]["messages"])


def interrupted(user):
    """An interrupted answer ends, and the chat continues."""
    n, user.proxy.replies = len(user.proxy.asked), [None, "Well."]
    command = [user.claude, "-p", *JSON, "--input-format", "stream-json"]
    with subprocess.Popen(command, **user.how, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def send(**what):
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()

        def say(text):
            send(type="user", message={"role": "user", "content": text})

        say("Tell me a very long story.")
        until(lambda: len(user.proxy.asked) > n and user.proxy.asked[n]["answer"].count(b"text_delta") >= 20)
        send(type="control_request", request_id="1", request={"subtype": "interrupt"})
        for line in process.stdout:
            if json.loads(line)["type"] == "result":
                break
        say("Stop it.")
        process.stdin.close()
        ends = [event for line in process.stdout if (event := json.loads(line))["type"] == "result"]
    assert [end["result"] for end in ends] == ["Well."]
    stopped, last = user.answered(n)
    assert stopped["gone"]
    user.goes_on([stopped, last])


CHECKS = (edits, fails, resumed, compacted, interrupted)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("claude", type=lambda path: str(Path(path).absolute()), help="Claude Code's program")
    parser.add_argument("--only", default="", help="names of checks, separated by commas")
    parser.add_argument("--record", type=Path, help="write the requests to this file")
    args = parser.parse_args()
    failed, noted = 0, []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "smollm2-135m.gguf"
        tiny.write_like(resolve("smollm2-135m"), model)
        with serving(model, "--budget", "1024") as server:
            for check in CHECKS:
                if args.only and check.__name__ not in args.only.split(","):
                    continue
                place = Path(folder) / check.__name__
                place.mkdir()
                with dictating(server.url) as proxy:
                    try:
                        check(User(args.claude, proxy, place))
                        outcome = "ok"
                    except Exception:  # noqa: BLE001
                        failed += 1
                        outcome = f"FAILED\n{traceback.format_exc()}"
                    noted += [{"check": check.__name__, **each} for each in proxy.asked]
                print(f"{check.__name__:12} {check.__doc__} {outcome}", flush=True)
    if args.record:
        args.record.write_text("".join(json.dumps(each, default=bytes.decode) + "\n" for each in noted))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
