"""Help, misspelt commands and options, options given twice, ranges, completion."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from typer.main import get_command

from kvtool import __version__, tasks
from kvtool.cli import COMMANDS, app, completion, near
from kvtool.cli.compare.command import _Grid
from kvtool.cli.examples import EXAMPLES
from kvtool.cli.models import _CacheTypes
from kvtool.cli.settings import all_commands
from kvtool.config.run import RunOptions
from kvtool.options import declared
from tests import fork_server
from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.cli.test_cli import KVTOOL, kvtool

ROOT = Path(__file__).parents[2]

COMMANDS_OF = dict(all_commands(get_command(app)))
ALL = ["", *sorted({" ".join(words[:n]) for words in COMMANDS_OF for n in range(1, len(words) + 1)})]


@pytest.mark.parametrize("words", ALL)
def test_help_and_version_flags_work_for_every_command(words):
    first, second, *versions = (
        run_kvtool(*words.split(), flag).stdout for flag in ("-h", "--help", "-V", "--version")
    )
    assert first == second == run_kvtool("help", *words.split()).stdout
    assert first.startswith(" ".join(["Usage: kvtool", *words.split(), "["]))
    assert versions == [f"kvtool {__version__}\n"] * 2
    titles = re.findall(r"^(\S.*):$", first, re.M)
    assert len(titles) == len(set(titles))
    assert ("Examples" in titles) == (words in EXAMPLES)
    # the placeholder of a value is a name in capitals, not a type; ranges are described in words
    help_text = first.split("\nExamples:")[0]
    assert not re.search(
        r"^  -.*<(int|float|text)|[{<]\w+[}>]|\[(?!required)[a-z_]+\](\.\.\.)?$|x[<>]=", help_text, re.M
    )


def test_every_command_has_two_valid_examples():
    commands = {" ".join(words): command for words, command in COMMANDS_OF.items()}
    assert {"", *commands} <= set(EXAMPLES)
    for words, examples in EXAMPLES.items():
        assert len(examples) == 2
        for example in examples if words in commands else ():
            (call,) = re.findall(rf"(?:^|[|(] ?)(kvtool {words}[^|>)]*)", example)[:1]
            commands[words].make_context("x", shlex.split(call)[1 + len(words.split()) :])


def test_examples_of_tasks_that_need_a_file_name_one():
    words = [example.partition(" -")[0].split()[2:] for example in EXAMPLES["eval"]]
    assert all(files or not tasks.load(task).needs_files for task, *files in filter(None, words))


def test_command_list_repeats_the_first_sentence_of_each_help():
    root = get_command(app)
    for name, sentence in COMMANDS.items():
        command = root.commands[name]
        text = " ".join((command.help or "").split())
        assert text.startswith(sentence), name
        assert sentence in " ".join(run_kvtool("--help").stdout.split())


def test_help_groups_options_and_shows_their_defaults():
    page = " ".join(kvtool("chat", "-h").stdout.split())
    order = ["Options: --system", "Cache and eviction: --policy", "Sampling: -n,", "Model and hardware: -m,"]
    order += ["Archive (recall): --archive ", "Output: --", "Help: -h,", "Examples: "]
    assert sorted(order, key=page.index) == order
    for default in ("smollm2-135m", "256", "0.95", "2048", "random", "recall"):
        assert f"[default: {default}]" in page
    assert "[default: 512 tokens; 1,024 with a policy that forgets]" in page
    # defaults are not in parentheses, and ranges are not in typer's form
    assert "(1,024" not in page
    assert "x>=" not in page


def test_aliases_of_options_work_and_are_not_shown():
    def value(name, words, *typed):
        return COMMANDS_OF[words].make_context("x", [*typed]).params[name]

    assert value("type_k", ("models", "show"), "--type-k", "q8_0") == "q8_0"
    assert value("temp", ("chat",), "--temperature=0.5") == 0.5
    assert value("seed", ("generate",), "-p", "-s", "-s", "9") == 9
    assert value("prompt", ("generate",), "-p", "-s", "-s", "9") == ("-s",)
    assert value("raw", ("generate",), "-no-cnv", "-f", "x") is True
    assert value("parallel", ("serve",), "-np", "3") == 3
    assert value("argument", ("generate",), "--", "-np") == "-np"
    # a key of the file applies to all commands, so no alias may be an option of any command
    options = {name for command in COMMANDS_OF.values() for param in command.params for name in param.opts}
    for words, command in COMMANDS_OF.items():
        declared = (param for param in command.params if param.param_type_name == "option")
        aliases = [alias for param in declared for alias in param.aliases]
        assert len(set(aliases) - options) == len(aliases), words
        for alias in aliases:
            assert not re.search(rf"(?<![\w-]){alias}(?![\w-])", shown_by(*words)), alias
    assert completed("kvtool chat --temper") == []


def test_json_means_the_same_in_every_command():
    for words, command in COMMANDS_OF.items():
        for param in command.params:
            if "--json" in param.opts:
                has_lines = words[0] in ("compare", "eval", "bench")
                text = "Print JSON: one JSON object a line." if has_lines else "Print JSON."
                assert (param.is_flag, param.help, param.opts) == (True, text, ["--json"]), words


@pytest.mark.parametrize("group", ["models", "session"])
def test_group_help_cuts_no_sentence_about_a_command(group):
    page = shown_by(group)
    for words, command in COMMANDS_OF.items():
        if words[0] == group:
            assert " ".join(command.help.split()).partition(". ")[0].removesuffix(".") + "." in page


def shown_by(*words):
    """Return the help of a command without its line breaks."""
    return " ".join(run_kvtool(*words, "-h").stdout.split())


def test_values_are_not_read_as_options_of_other_programs():
    generate = COMMANDS_OF["generate",]
    assert generate.make_context("x", ["-p", "-hf", "--system=-hf"]).params["prompt"] == ("-hf",)
    assert generate.make_context("x", ["--", "-hf"]).params["argument"] == "-hf"


def test_options_of_llama_cpp_get_advice():
    for advice, names in near.ADVICE.items():
        for name in names:
            assert_one_line(run_kvtool("bench", name, "x"), 2, advice.format(value="x"))


def test_every_suggested_command_exists():
    commands = {" ".join(words) for words in COMMANDS_OF} | {"--version", "models rm"}
    for group, names in near.INSTEAD.items():
        assert set(names.values()) <= commands
        at = get_command(app)
        for word in group.split()[1:]:
            at = at.commands[word]
        # kvtool suggests other commands for these names, so the names must not be commands
        assert not set(names) & set(at.commands)


SAME = "name the same file, "
WITH_RAW = "is for the chat template, which --raw leaves out; leave out one of them"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("generate x -p y", "'x' and -p 'y' are two prompts; leave out one of them"),
        ("generate -p x -p y", "-p 'x' and -p 'y' are two prompts; leave out one of them"),
        ("chat x -m y", "'x' and -m 'y' are two models; leave out one of them"),
        ("generate x --raw --hide-thinking", f"--hide-thinking {WITH_RAW}"),
        ("generate x --raw --system y", f"--system {WITH_RAW}"),
        ("generate x --raw --system-file /dev/null", f"--system-file {WITH_RAW}"),
        ("chat --session a.kv --transcript ./a.kv", f"--session and --transcript {SAME}a.kv"),
        ("chat --session a.kv --reread ./a.kv", f"--session and --reread {SAME}a.kv"),
        ("chat --transcript a.kv --reread link", f"--transcript and --reread {SAME}link"),
        ("chat --session a.kv --transcript link", f"--session and --transcript {SAME}link"),
        ("chat --session a.kv --transcript a.kv.archive", f"archive of --session and --transcript {SAME}"),
        ("compare a.txt --records a.png --plot ./a.png", f"--records and --plot {SAME}a.png"),
        (f"compare a.txt --records=~/a.png --plot {Path.home()}/a.png", f"--plot {SAME}{Path.home()}/a.png"),
        ("chat --session ''", "the session's name is empty; name a file"),
        ("chat --transcript=", "the transcript's name is empty; name a file"),
    ],
)
def test_conflicting_arguments_get_one_line(typed, message, tmp_path):
    (tmp_path / "link").symlink_to("a.kv")
    done = run_kvtool(*shlex.split(typed), cwd=tmp_path)
    assert_one_line(done, 2, message)
    assert SAME not in message or done.stderr.endswith("; name another file\n")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize(
    ("typed", "flag", "output"),
    [
        ("inspect ./in", "FILE", "--html"),
        ("compare in", "FILE", "--plot"),
        ("compare in --resume", "FILE", "--records"),
        ("compare x -m ./in", "--model", "--plot"),
        ("inspect x --lora in", "--lora", "--html"),
        ("chat --policy in.py", "--policy", "--transcript"),
        ("chat --draft in", "--draft", "--transcript"),
        ("chat --system-file in", "--system-file", "--session"),
        ("chat --chat-template in", "--chat-template", "--transcript"),
    ],
)
@pytest.mark.parametrize("name", ["in", "symbolic", "hard"])
def test_output_must_not_be_an_input(typed, flag, output, name, tmp_path):
    (tmp_path / "in").write_text("a text")
    (tmp_path / "in.py").symlink_to("in")
    (tmp_path / "symbolic").symlink_to("in")
    (tmp_path / "hard").hardlink_to(tmp_path / "in")
    done = run_kvtool(*typed.split(), output, name, cwd=tmp_path)
    assert_one_line(done, 2, f"kvtool: {flag} and {output} name the same file, ")
    assert (tmp_path / "in").read_text() == "a text"


def test_cache_types_ignore_upper_and_lower_case():
    for kind in (RunOptions, _CacheTypes):
        for name in declared(kind).keys() & {"type_k", "type_v", "archive_type"}:
            assert getattr(kind.from_values({name: "Q8_0"}), name) == "q8_0", (kind, name)
    assert _Grid.from_values({"types": "Q8_0,BF16"}).types == "q8_0,bf16"


def test_prompt_may_be_argument_option_file_or_stdin(default_talker, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("Say hello.\n")
    (tmp_path / "system.txt").write_text("Be brief.\n")

    def reply_to(*arguments, stdin=""):
        done = kvtool("generate", *arguments, "-n", 6, "--temp", 0, "-t", 1, "--json", stdin=stdin)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        return record["text"], record["prompt_tokens"]

    expected = reply_to("-p", "Say hello.")
    file = tmp_path / "prompt.txt"
    assert (
        reply_to("Say hello.")
        == reply_to("-f", file)
        == reply_to("-f", "-", stdin="Say hello.\n")
        == expected
    )
    both = reply_to("Go on.", stdin="Say hello.")
    assert reply_to("Go on.", "-f", file) == reply_to("-p", "Go on.", "--file", file) == both != expected
    (tmp_path / "more notes.txt").write_text("And Tom.\n")
    two = "-f", file, "-f", tmp_path / "more notes.txt"
    assert reply_to(*two) == reply_to("Say hello.\n\nAnd Tom.") != expected
    whole = "Say hello.\n\nAnd Tom.\n\nBye."
    assert reply_to("Go on.", *two, stdin="Bye.") == reply_to("Go on.", stdin=whole)
    # the variable for a repeatable option takes several values, or the name of one file with blanks
    for names, prompt in ((two[3], "And Tom."), (f"{file} {file}", "Say hello.\n\nSay hello.")):
        monkeypatch.setenv("KVTOOL_GENERATE_FILE", str(names))
        assert reply_to() == reply_to("-f", "-", stdin=prompt)
    monkeypatch.delenv("KVTOOL_GENERATE_FILE")
    system = reply_to("Say hello.", "--system", "Be brief.")
    assert reply_to("Say hello.", "--system-file", tmp_path / "system.txt") == system != expected


def test_minus_1_means_no_limit_or_a_random_seed(default_talker):
    # this bias of the end makes answers of a few tokens
    command = ("generate", "Name a colour.", "--temp", 1, "-t", 1, "--logit-bias", "2+3")
    without = kvtool(*command, "-n", -1, "--seed", 3).stdout
    assert without == kvtool(*command, "--seed", 3).stdout
    first = kvtool(*command, "--n-predict", 1, "--seed", 3).stdout.rstrip("\n")
    assert without.startswith(first)
    assert 0 < len(first) < len(without.rstrip("\n"))
    drawn = {
        kvtool(*command, "-n", 12, "--seed", -1, "--temp", 2, "--top-p", 1, "--min-p", 0).stdout
        for _ in "abc"
    }
    assert len(drawn) > 1


def test_context_above_the_trained_length_is_reported(default_talker, tmp_path):
    (tmp_path / "text").write_text("The tide came in. " * 9)
    line = "--ctx-size 9,000 is above the model's trained length; 8,192 is used\n"
    generate = kvtool("generate", "Hi", "-n", 1, "-t", 1, "-c", 9000)
    assert (generate.returncode, generate.stderr) == (0, line)
    assert kvtool("perplexity", tmp_path / "text", "-t", 1, "-c", 9000).stderr.startswith(line)
    compare = kvtool(
        "compare", tmp_path / "text", "-t", 1, "-c", 9000, "--policies", "local", "--budgets", 16
    )
    assert compare.stderr.count(line) == 1
    assert kvtool("generate", "Hi", "-n", 1, "-t", 1, "-c", 8192).stderr == ""
    # 0 means the trained context, like in llama.cpp
    assert kvtool("generate", "Hi", "-n", 1, "-t", 1, "-c", 0).stderr == ""


def test_batch_above_the_context_is_cut_and_reported(tiny_model, tmp_path):
    (tmp_path / "text").write_text("The tide came in. " * 9)
    line = "--batch-size 4,000,000,000 is above the context length; 256 is used\n"
    options = "-m", tiny_model(n_ctx_train=256), "-t", 1, "-b", 4_000_000_000, "--policy", "h2o"
    for command in (
        ("generate", "Hi", "--raw", "-n", 1, "--budget", 64),
        ("perplexity", tmp_path / "text", "--budget", 64),
    ):
        done = kvtool(*command, *options)
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(line)


def test_gpu_layers_without_a_gpu_are_reported(default_talker, tmp_path, monkeypatch):
    line = "--gpu-layers 99 does nothing: kvtool finds no GPU (`kvtool doctor` lists the devices)\n"
    (tmp_path / "text").write_text("The tide came in. " * 9)
    monkeypatch.setattr("kvtool.llama.libllama.devices.has_gpu", lambda: False)
    options = ("-t", 1, "-ngl")
    for words in (
        ("generate", "Hi", "-n", 1),
        ("inspect", tmp_path / "text"),
        ("compare", tmp_path / "text", "--policies", "local", "--budgets", 16),
        ("eval", "passkey", "--set", "lengths=64", "--limit", 1),
    ):
        assert run_kvtool(*words, *options, 99).stderr.count(line) == 1, words
    assert "--gpu-layers" not in run_kvtool("generate", "Hi", "-n", 1, *options, 0).stderr
    monkeypatch.setattr("kvtool.llama.libllama.devices.has_gpu", lambda: True)
    assert "--gpu-layers" not in run_kvtool("generate", "Hi", "-n", 1, *options, 99).stderr


def test_a_prompt_that_full_cannot_hold_is_refused_before_it_is_read(default_talker):
    done = run_kvtool("generate", "word " * 400, "--policy", "full", "-c", 256, "-t", 1)
    assert (done.returncode, done.stdout) == (5, "")
    assert re.fullmatch(
        r"kvtool: the prompt \([\d,]+ tokens\) does not fit in the cache \(256\) and `full` never evicts; "
        r"use --policy recall or a shorter prompt\n",
        done.stderr,
    )


MINE = """
from dataclasses import dataclass
from kvtool.policies.h2o import H2O

@dataclass(frozen=True, slots=True)
class Mine(H2O):
    def plan(self, view, state):
        return self.helper()

    def helper(self):
        raise RuntimeError("no idea")

POLICY = Mine
"""


def test_v_shows_the_traceback_of_a_user_policy_and_vv_llama_cpps_log(default_talker, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)

    def stderr_of(*arguments):
        done = kvtool("generate", "word " * 99, "-t", 1, "--budget", 64, *arguments)
        return done.returncode, done.stderr

    options = ("--policy", tmp_path / "mine.py")
    line = "kvtool: Mine.plan: RuntimeError: no idea (mine.py, line 11)\n"
    code, plain = stderr_of(*options)
    assert (code, "Traceback" in plain, plain.endswith(f"\n{line}")) == (7, False, True)
    code, stderr = stderr_of(*options, "-v")
    assert code == 7
    assert 'mine.py", line 8, in plan' in stderr
    assert 'mine.py", line 11, in helper' in stderr
    # -v shows the lines of the policy, but not the lines of the engine
    assert "eviction.py" not in stderr
    assert stderr.endswith(f"RuntimeError: no idea\n{line}")
    assert "llama_context" not in stderr
    assert "llama_context" in stderr_of(*options, "-vv")[1]
    code, plain = stderr_of("-n", 2, "-v")
    assert (code, "cells per row" in plain, "llama_context" in plain) == (0, True, False)
    (tmp_path / "mine.py").write_text("x = (")
    assert "SyntaxError" in stderr_of(*options, "-v")[1].split("\nkvtool: ")[0]


def test_explain_shows_the_unused_bytes_of_a_small_budget(default_talker):
    done = kvtool("generate", "Hi", "-n", 1, "-t", 1, "--budget", 100, "-b", 64, "--explain")
    # bytes of a cell: 2 layers, K and V, 2 heads of 32 numbers in f16
    cell = 2 * 2 * 2 * 32 * 2
    used, spare = 100 * cell / 2**10, 156 * cell / 2**10
    assert f"(256 cells per row; {used:.1f} KiB for the budget's cells, {spare:.1f} KiB more " in done.stderr
    of_256 = "--policy", "h2o", "--budget", 256
    done = kvtool("generate", "Hi", "-n", 1, "-t", 1, *of_256, "-b", 1, "--explain")
    assert "(256 cells per row), " in done.stderr


@pytest.mark.parametrize(("budget", "is_shown"), [(100, True), (256, False)])
def test_terminal_shows_the_unused_bytes_of_a_small_budget(default_talker, budget, is_shown):
    master, slave = pty.openpty()
    command = [*KVTOOL, "generate", "Hi", "-n", "1", "-t", "1", "--budget", str(budget), "-b", "64"]
    fork_server.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave, check=True)
    # `os.read` would wait if the command wrote nothing, so the test itself writes a byte.
    os.write(slave, b".")
    os.close(slave)
    output = os.read(master, 4096).decode()
    os.close(master)
    assert (
        output.startswith("a budget of 100 takes 50.0 KiB for the budget's cells, 78.0 KiB more ") == is_shown
    )
    # another line says that -n has cut the answer
    assert output.count("\n") == is_shown + 1


def test_error_lines_wrap_between_words():
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    fork_server.run([*KVTOOL, "chat", "--evict-every", "x"], stdin=subprocess.DEVNULL, stderr=slave)
    os.close(slave)
    lines = os.read(master, 4096).decode().splitlines()
    os.close(master)
    assert " ".join(lines) == kvtool("chat", "--evict-every", "x").stderr.strip()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 40


def bash(line):
    """Return the variables with which bash asks for the completion of the last word of `line`."""
    return {"_KVTOOL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}


def completed(line):
    done = run_kvtool(env=bash(line))
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvtool ch", ["chat"]),
        ("kvtool models sh", ["show"]),
        ("kvtool help gen", ["generate"]),
        ("kvtool chat --bud", ["--budget"]),
        ("kvtool chat --policy st", ["streamingllm"]),
        ("kvtool chat --policy buzz -o thr", ["threshold="]),
        ("kvtool chat -o sin", ["sinks="]),
        ("kvtool perplexity --policy h2o -o dec", ["decay=", "decay_beyond="]),
        ("kvtool chat --policy none -o x", []),
        ("kvtool policies stre", ["streamingllm"]),
        ("kvtool compare x --policies st", ["streamingllm"]),
        ("kvtool chat -ctk q8", ["q8_0"]),
        ("kvtool generate --archive-type bf", ["bf16"]),
        ("kvtool chat smollm2-135", ["smollm2-135m"]),
        ("kvtool chat -m smollm2-135", ["smollm2-135m"]),
        ("kvtool models show smollm2-135", ["smollm2-135m"]),
        ("kvtool eval passk", ["passkey"]),
        ("kvtool chat --positions in", ["in-cache"]),
        ("kvtool chat -fa o", ["on", "off"]),
        # the shell itself completes file names
        ("kvtool chat -m ./x", []),
    ],
)
def test_bash_completes_commands_options_and_values(line, expected):
    assert completed(line) == expected


def test_completion_of_sessions_offers_only_sessions_and_folders(tmp_path, monkeypatch):
    (tmp_path / "talk.kv").write_bytes(b"kvtool session 1 ")
    (tmp_path / "tale.txt").write_text("A tale.")
    (tmp_path / "talks").mkdir()
    (tmp_path / "talks" / "old").write_bytes(b"kvtool session 2 ")
    os.mkfifo(tmp_path / "talk.pipe") if hasattr(os, "mkfifo") else None
    monkeypatch.chdir(tmp_path)
    assert completion.sessions("ta") == ["talk.kv", "talks/"]
    assert completion.sessions("talks/") == ["talks/old"]
    assert completion.sessions(f"{tmp_path}/talk.") == [f"{tmp_path}/talk.kv"]
    assert completion.sessions("nowhere/") == []


def test_completion_works_with_an_invalid_config_file(tmp_path):
    (tmp_path / "wrong.toml").write_text("budge = 1")
    env = os.environ | bash("kvtool chat --bud") | {"KVTOOL_CONFIG": str(tmp_path / "wrong.toml")}
    assert fork_server.run(KVTOOL, env=env, check=True).stdout.split() == ["--budget"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_complete_too(shell):
    variables = {
        "_KVTOOL_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "kvtool chat --policy str",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = fork_server.run(KVTOOL, env={**os.environ, **variables}, check=True)
    assert "streamingllm" in done.stdout
    assert "h2o" not in done.stdout
    source = {**os.environ, "_KVTOOL_COMPLETE": f"source_{shell}"}
    assert "complete" in fork_server.run(KVTOOL, env=source, check=True).stdout
