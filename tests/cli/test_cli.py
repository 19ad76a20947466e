"""Commands: their output to stdout and stderr, and their exit codes."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from kvtool.cli import COMMANDS
from kvtool.measure import perplexity
from tests import fork_server
from tests.blocking_policy import TIMEOUT_S
from tests.cli.in_process_command import RECALL_LINE, assert_one_line, drop_cut_lines, run_kvtool
from tests.engine.exact_engines import KINDS, open_engine

TEXT = (
    "The tide came in over the flats before sunrise, and the birds that had fed there moved up the shore. "
    "A woman with a lantern walked along the wall, counting the posts that the winter had left standing. "
) * 12

WRITING = Path(__file__).parents[2] / "docs" / "writing-a-policy.md"

KVTOOL = [sys.executable, "-m", "kvtool"]


def kvtool(*arguments, stdin="", **kwargs):
    return drop_cut_lines(fork_server.run([*KVTOOL, *arguments], input=stdin, **kwargs))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "tide.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def loaded_by_help():
    """Map each command to (its help, the heavy modules that are loaded after printing it).

    One process prints the help of all commands, one after the other.
    """
    code = (
        "import contextlib, io, json, sys\n"
        "from kvtool.cli import app\n"
        "heavy = {'numba', 'numpy', 'gguf', 'kvtool_llama', 'llama_cpp', 'jinja2', 'huggingface_hub'}\n"
        "heavy.add('rich.table')\n"
        "found = {}\n"
        "for command in sys.argv[1:]:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        try: app([command, '--help'] if command else ['--help'])\n"
        "        except SystemExit as end: assert not end.code\n"
        "    found[command] = out.getvalue(), sorted(heavy & set(sys.modules))\n"
        "print(json.dumps(found))\n"
    )
    done = fork_server.run_python("-c", code, "", *COMMANDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_loads_nothing_heavy(loaded_by_help, command):
    text, heavy = loaded_by_help[command]
    assert not heavy
    assert "Usage" in text


def test_command_does_not_import_other_commands():
    """The command does not load other commands, pydantic or gguf.

    New versions of typer import pydantic, which is slow.
    """
    code = (
        "import sys\n"
        "from kvtool.cli import app\n"
        "try: app(['models', 'show', 'no-such-model'])\n"
        "except SystemExit: pass\n"
        "which = 'kvtool.cli.', 'pydantic', 'gguf'\n"
        "print(*sorted(name for name in sys.modules if name.startswith(which)))\n"
    )
    done = fork_server.run_python("-c", code, check=True)
    used = (
        *("command", "completion", "console", "declared", "listed", "locate", "models", "near", "progress"),
        "settings",
    )
    assert done.stdout.split() == [f"kvtool.cli.{name}" for name in used]


def test_help_lists_commands_in_order_and_typos_get_a_suggestion():
    listed = kvtool("--help").stdout.split("Commands:\n")[1]
    named = [line.split()[0] for line in listed.split("\n\n")[0].splitlines() if line[2] != " "]
    assert named == list(COMMANDS)
    assert kvtool("chatt").stderr == "kvtool: there is no command 'chatt'. Did you mean `kvtool chat`?\n"


def test_answer_cut_by_n_is_reported(talker):
    common = "-m", talker, "-t", 1, "--temp", 0
    for command in (("generate", "hi"), ("generate", "hi", "--json"), ("chat",)):
        done = run_kvtool(*command, *common, "-n", 3, "--policy", "h2o", stdin="hi\n")
        assert (done.returncode, done.stderr) == (0, "stopped after 3 tokens (-n)\n")
    # nothing is printed if the model itself has ended the answer
    grammar = "--grammar", 'root ::= "yes"'
    assert run_kvtool("generate", "hi", *common, *grammar, "--policy", "h2o").stderr == ""


@pytest.mark.parametrize("command", ["perplexity", "compare"])
@pytest.mark.parametrize(("arch", "least"), [("gemma3", "256.0 KiB"), ("lfm2", "131.0 KiB")])
def test_budget_in_bytes_must_hold_the_smallest_cache(tiny_model, text_file, arch, least, command):
    options = ["-m", tiny_model(arch=arch), "-b", 16, "-t", 1, "--max-tokens", 40]
    budget = "--budgets" if command == "compare" else "--budget"
    policy = "--policies" if command == "compare" else "--policy"
    line = f"kvtool: 129KiB is too small for this model: its smallest cache (256 tokens) takes {least}\n"
    assert_one_line(run_kvtool(command, text_file, *options, policy, "h2o", budget, "129KiB"), 2, line)
    if command == "perplexity":
        done = run_kvtool(
            command, text_file, *options, policy, "h2o", budget, least.replace(" ", ""), "--json"
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["budget"] == 256


@pytest.mark.parametrize("command", ["perplexity", "generate"])
def test_a_small_budget_in_bytes_lowers_the_batch(tiny_model, text_file, command):
    options = ["-m", tiny_model(arch="gemma3"), "-t", 1, "--policy", "h2o", "--budget", "256KiB", "--json"]
    options += (
        [text_file, "--max-tokens", 200] if command == "perplexity" else ["-n", 300, "--raw", "-p", "hi"]
    )
    done = kvtool(command, *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["kv_bytes"] <= 256 * 2**10
    larger = kvtool(command, *options, "-b", 256)
    assert larger.stderr == "--batch-size 256 does not fit into 256KiB; 64 is used\n"
    assert kvtool(command, *options, "-b", 64).stderr == ""


@pytest.mark.parametrize("command", ["perplexity", "compare"])
def test_a_text_of_one_token_is_too_short(tmp_path, smollm2, command):
    (tmp_path / "one.txt").write_text("a")
    line = f"kvtool: {tmp_path / 'one.txt'} is too short: 1 token, at least 2 needed\n"
    assert_one_line(run_kvtool(command, tmp_path / "one.txt"), 5, line)


def test_policies_lists_all_policies_and_their_parameters():
    listed = {policy["name"]: policy for policy in json.loads(run_kvtool("policies", "--json").stdout)}
    assert {"full", "local", "random", "streamingllm", "h2o", "tova", "buzz"} <= set(listed)
    assert listed["streamingllm"]["params"] == {"sinks": 4}
    assert listed["h2o"]["paper"] == "arXiv:2306.14048"
    # the table has the names and what each policy keeps; in a pipe nothing is cut
    title, *lines, blank, more = run_kvtool("policies").stdout.splitlines()
    assert (title.split()[0], blank) == ("policy", "")
    assert [line.split()[0] for line in lines] == list(listed)
    assert [line.split()[0] for line in lines if " (default)  " in line] == ["recall"]
    assert all(line.endswith(".") and len(line) < 140 for line in lines)
    assert "h2o               Keep the newest tokens and the heavy hitters." in lines
    assert more == "kvtool policies NAME shows a policy's paper and its parameters."


def test_policies_explains_every_parameter():
    for policy in json.loads(run_kvtool("policies", "--json").stdout):
        assert set(policy["explained"]) == set(policy["params"]), policy["name"]
        assert all(text.endswith(".") for text in policy["explained"].values()), policy["name"]
    (h2o,) = json.loads(run_kvtool("policies", "h2o", "--json").stdout)
    assert h2o["explained"]["sinks"] == "First tokens, never evicted."
    assert h2o["explained"]["window"] == (
        "Newest tokens, kept if pinned tokens leave room. Default: half of the kept tokens."
    )
    # in the docstring, this text spans two lines
    whole = "of a unit add up their scores and keep the same tokens."
    assert h2o["explained"]["per"].endswith(whole)
    # the table has a line for each parameter, with its default and its effect
    lines = [line.split() for line in run_kvtool("policies", "h2o").stdout.splitlines()]
    assert ["parameter", "(-o)", "default", "what", "it", "does"] in lines
    assert ["sinks", "0", "First", "tokens,", "never", "evicted."] in lines
    assert {line[0] for line in lines if len(line) > 3} >= set(h2o["params"])


def test_an_answer_that_fills_the_cache_is_printed(default_talker):
    words = "generate", "The river", "--policy", "full", "-c", 60, "-n", 500, "--temp", 0, "--draft", "off"
    plain, done = run_kvtool(*words), run_kvtool(*words, "--json")
    record = json.loads(done.stdout)
    assert record["finish_reason"] == "full"
    assert record["text"] == plain.stdout.rstrip("\n") != ""
    assert plain.returncode == done.returncode == 6
    assert plain.stderr == done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_perplexity_json_has_the_documented_keys(text_file, default_talker):
    options = ("--policy", "h2o", "--budget", 256, "--max-tokens", 400)
    done = kvtool("perplexity", text_file, "-t", 1, "--json", *options)
    result = json.loads(done.stdout)
    assert set(result) == {
        *("perplexity", "nll", "tokens", "policy", "budget", "asked", "params", "model", "lora", "cells"),
        *("held", "kv_bytes", "state_bytes", "archived", "archive_bytes", "archive_limit", "archive_file"),
        *("archive_type", "resident", "repeated", "resident_refusal"),
        *("tokens_per_s", "seconds", "complete", "peak_rss_bytes"),
        *("text_sha256", "kvtool", "llama_cpp_python", "patch"),
    }
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"]))
    assert result["tokens"] == 399
    # 2 layers, K and V, 2 heads, 32 numbers of 2 bytes (f16), 256 cells
    assert result["kv_bytes"] == 2 * 2 * 2 * 32 * 2 * 256
    assert result["tokens_per_s"] > 0


def test_speed_of_perplexity_counts_only_tokens_in_windows(text_file, default_talker):
    options = ("--policy", "full", "--windows", 240, "--max-tokens", 479)
    result = json.loads(kvtool("perplexity", text_file, "-t", 1, "--json", *options).stdout)
    assert result["tokens"] == 119
    assert result["tokens_per_s"] * result["seconds"] == pytest.approx(240)


@pytest.mark.parametrize("add_bos", [False, True])
def test_windows_of_perplexity_are_those_of_llama_perplexity(tiny_model, tmp_path, add_bos):
    """llama-perplexity puts a BOS token before the text, and later over the first token of each window."""
    path, file = tiny_model(add_bos=add_bos), tmp_path / "text"
    file.write_text("The tide came in. " * 5)
    with open_engine(path, policies.fit("full", 40), n_output=40, over_budget=False) as engine:
        tokens = engine.model.tokenize(file.read_text(), start=True)
        assert bool(tokens[0] == engine.model.bos) is add_bos
        expected = []
        for at in range(0, len(tokens) - 40 + 1, 40):
            window = tokens[at : at + 40].copy()
            window[0] = engine.model.bos if add_bos else window[0]
            engine.reset()
            expected.extend(perplexity.stream(engine, window)[20:])
    options = ("-m", path, "-t", 1, "--policy", "full", "--windows", 40, "--json", "-fa", "off")
    result = json.loads(kvtool("perplexity", file, *options).stdout)
    assert result["tokens"] == len(expected) == 38
    assert result["nll"] == pytest.approx(np.mean(expected), abs=1e-3)


def test_perplexity_works_with_a_policy_that_reads_prompts_whole(text_file, default_talker):
    done = kvtool("perplexity", text_file, "-t", 1, "--policy", "snapkv", "--budget", 64, "--max-tokens", 100)
    assert done.returncode == 0
    assert "each KV head keeps at most 64 of them (64 %)" in done.stderr


def test_perplexity_reads_stdin_and_prints_one_number(smollm2):
    done = kvtool("perplexity", "-", "-t", 1, "--max-tokens", 64, stdin=TEXT)
    assert done.returncode == 0
    assert 1 < float(done.stdout) < 1000
    assert "63 tokens scored" in done.stderr


@pytest.mark.parametrize("policy", ["h2o", "recall"])
def test_budget_beyond_the_context_is_reported_as_the_whole_context(talker, policy):
    command = "generate", "hi", "-n", 1, "-t", 1, "-m", talker, "--policy", policy
    done = kvtool(*command, "--budget", "1TiB")
    line = r"--budget 1TiB holds the whole context: the budget is [0-9,]+ of its 8,192 tokens\n"
    assert re.fullmatch(line, done.stderr)
    assert "whole" not in kvtool(*command, "--budget", "1MiB").stderr


def test_prompt_that_names_a_file_gets_a_hint(chat_model, tmp_path):
    (tmp_path / "notes.md").write_text("Hello.")
    command = ("generate", "-m", chat_model, "-t", 1, "-n", 1)
    line = "notes.md is a file; use -f notes.md to read it\n"
    assert kvtool(*command, "notes.md", cwd=tmp_path).stderr == line
    assert kvtool(*command, "-p", "notes.md", cwd=tmp_path).stderr == line
    assert kvtool(*command, "-f", "notes.md", cwd=tmp_path).stderr == ""
    (tmp_path / "my notes.md").write_text("Hello.")
    line = "my notes.md is a file; use -f 'my notes.md' to read it\n"
    assert kvtool(*command, "my notes.md", cwd=tmp_path).stderr == line
    assert "use `kvtool chat 'my model.gguf'`" in kvtool("my model.gguf").stderr
    # neither prompt is the name of a file
    for prompt in ("notes", "word " * 200):
        assert "is a file" not in kvtool(*command, prompt, cwd=tmp_path).stderr


@pytest.mark.parametrize("policy", KINDS)
def test_every_kind_of_policy_can_generate(default_talker, policy):
    # the prompt exceeds the budget, and the reply is long enough for further evictions
    done = kvtool(
        *("generate", "--raw", "-n", 20, "--temp", 0, "-t", 1, "--policy", policy, "--json"),
        *("--budget", 64, "--evict-every", 8, "-b", 32),
        stdin=TEXT[:600],
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 1 <= result["tokens"] <= 20
    assert result["finish_reason"] == ("length" if result["tokens"] == 20 else "stop")
    assert result["prompt_tokens"] + result["tokens"] - 1 - result["evicted"] <= 64
    assert result["cells"] < 64


@pytest.mark.parametrize("prefill", ["stream", "whole"])
def test_prefill_option_selects_stream_or_whole(default_talker, prefill):
    done = kvtool(
        *("generate", "-n", 4, "--temp", 0, "-t", 1, "--policy", "h2o", "--budget", 64, "-b", 32),
        *("--prefill", prefill, "-vv"),
        stdin=TEXT[:1200],
    )
    assert done.returncode == 0
    assert "/64 cells" in done.stderr
    # "whole" frees its large cache after the prompt, so llama.cpp reserves its buffers again
    assert (done.stderr.count("reserving ...") > 2) == (prefill == "whole")


def test_corm_works_without_a_budget(text_file, default_talker):
    means = []
    for history in (32, 40):
        options = ("--policy", "corm", "-o", f"history={history}", "--json")
        result = json.loads(kvtool("perplexity", text_file, "-t", 1, "--max-tokens", 400, *options).stdout)
        assert result["budget"] == 8192
        assert 32 < result["cells"] < result["tokens"]
        means.append(result["cells"])
    # `cells` is a mean over 4 rows. If rows differ, it is unlikely to be a whole number in both runs.
    assert any(mean % 1 for mean in means)
    # At most 1.6 times the bytes of the cells are allocated. The model has 2 layers, each with K and V of 2
    # heads with 32 numbers in f16.
    assert result["kv_bytes"] < 1.6 * result["cells"] * 2 * 2 * 2 * 32 * 2


def test_documented_example_policy_works_from_a_file(text_file, default_talker, tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```$", WRITING.read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "mine.py").write_text(code)
    options = ("--policy", "./mine.py", "-o", "window=16", "--budget", 128)
    done = kvtool("perplexity", text_file, "-t", 1, "--max-tokens", 300, *options, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["params"] == {"window": 16, "sinks": 4}
    (listed,) = json.loads(kvtool("policies", "./mine.py", "--json", cwd=tmp_path).stdout)
    assert listed["params"] == {"window": None, "sinks": 4}
    assert listed["what"].startswith("Average: ")


def test_generate_ends_quietly_when_its_pipe_is_closed(smollm2):
    writer = fork_server.Popen(
        [*KVTOOL, "generate", "--raw", "-p", "1\n2\n3\n4\n5\n", "-n", "200", "--temp", "0", "-t", "1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout.readline().strip()
    writer.stdout.close()
    assert writer.wait(TIMEOUT_S) == 128 + signal.SIGPIPE
    assert writer.stderr.read() == ""
    writer.stderr.close()


def test_chat_answers_each_line_of_a_pipe(default_talker):
    done = kvtool("chat", "--temp", 0, "-t", 1, "-n", 12, stdin="Hello!\n\nWhat is two plus two?\n")
    assert done.returncode == 0
    assert len([line for line in done.stdout.split("\n") if line]) >= 2
    assert ">" not in done.stdout
    assert re.fullmatch(RECALL_LINE, done.stderr)


@pytest.mark.parametrize(("words", "stdin"), [(("generate", "Hi"), ""), (("chat",), "Hi\n")])
def test_cut_text_of_a_grammar_may_be_incomplete(talker, words, stdin):
    options = ("-m", talker, "--policy", "h2o", "-t", 1, "-n", 3, "--grammar", 'root ::= "abcdefghijkl"')
    done = run_kvtool(*words, *options, stdin=stdin)
    assert (done.returncode, done.stdout[:3]) == (0, "abc")
    assert done.stderr == "stopped after 3 tokens (-n): the text may be incomplete\n"


def test_endless_answer_is_cut_at_the_default_limit(talker):
    options = ("-m", talker, "-c", 4096, "--policy", "local", "--budget", 128, "-t", 1, "--temp", 0)
    options += ("--draft", "off", "-l", "2-inf")
    line = "stopped after 2,048 tokens; -n N changes the limit, and -n -1 removes it\n"
    for done in (kvtool("generate", "Hello!", *options), kvtool("chat", *options, stdin="Hello!\n")):
        assert (done.returncode, done.stderr) == (0, line)
    # a user who has set the limit needs no advice about -n
    assert run_kvtool("generate", "Hello!", *options, "-n", 8).stderr == "stopped after 8 tokens (-n)\n"


@pytest.mark.parametrize("more", [(), ("--json",), ("--windows", 4)], ids=["text", "json", "windows"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_perplexity_prints_its_partial_result(monkeypatch, talker, tmp_path, number, more):
    name = "windows" if "--windows" in more else "stream"
    plain = getattr(perplexity, name)

    def interrupted(engine, tokens, *arguments):
        *before, scored = arguments

        def stop(nll):
            signal.raise_signal(number)
            scored(nll)

        return plain(engine, tokens, *before, stop)

    (tmp_path / "text.txt").write_text("A text of some words. " * 3)
    command = "perplexity", tmp_path / "text.txt", "-m", talker, "-t", 1, "--policy", "h2o", "--budget", 8
    whole = json.loads(run_kvtool(*command, *more, "--json").stdout)
    assert whole["complete"] is True
    monkeypatch.setattr(perplexity, name, interrupted)
    done = run_kvtool(*command, *more)
    assert done.returncode == 128 + number
    if "--json" in more:
        result = json.loads(done.stdout)
        assert result["complete"] is False
        assert 0 < (n := result["tokens"]) < whole["tokens"]
    else:
        assert float(done.stdout) > 1
        n = int(re.search(r"^incomplete: (\d+) of", done.stderr, re.M)[1])
    assert "stopping after the current step ...\n" in done.stderr
    assert done.stderr.endswith(f"kvtool: stopped; {n} of {whole['tokens']} tokens are scored\n")


@pytest.mark.parametrize(
    ("command", "stdin"), [(["generate", "hi"], ""), (["generate", "hi", "--json"], ""), (["chat"], "hi\n")]
)
def test_an_empty_answer_is_explained(talker, command, stdin):
    noun = "reply" if command == ["chat"] else "answer"
    model_options = "-m", talker, "-t", 1, "-n", 4
    for options, line in (
        (["--grammar", "root ::= "], f"the {noun} is empty: the grammar allows no text"),
        (["--grammar", 'root ::= "a" | ""', "--logit-bias", "2+99"], f"the model ended its {noun} at once"),
        (
            ["--grammar", 'root ::= "a"', "--stop", "a"],
            f"the {noun} is empty: it began with the stop text 'a'",
        ),
    ):
        done = run_kvtool(*command, *model_options, *options, stdin=stdin)
        assert done.returncode == 0
        assert done.stderr.splitlines()[-1] == line
    assert (
        "empty" not in run_kvtool(*command, *model_options, "--grammar", 'root ::= "a"', stdin=stdin).stderr
    )
