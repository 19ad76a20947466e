"""Defaults of options: typed options have priority over variables, and variables over the file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from kvtool import policies
from kvtool.cli import app, config, settings
from kvtool.errors import InputError, UsageError
from kvtool.system.texts import check_file
from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.cli.test_cli import kvtool

ROOT = get_command(app)
PAGE = Path(__file__).parents[2] / "docs" / "cli.md"

FILE = """
budget = 512
temp = 0.5
policy = "tova"

[chat]
n = 100
option = ["window=64"]
seed = 1

[models."smollm2-135m"]
ctx-size = 4096
temp = 0.25

[models."smollm2-135m".generate]
temp = 0.125

[models.other]
temp = 0.75
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """file(text) writes the config file and returns its path."""
    path = tmp_path / "config.toml"
    monkeypatch.setenv("KVTOOL_CONFIG", str(path))

    def write(text):
        path.write_text(text, encoding="utf-8")
        return path

    write(FILE)
    return write


def test_eval_ignores_general_sampling_settings(file, monkeypatch):
    file("temp = 0.9\nthreads = 3\n[models.other]\nseed = 4\n")
    monkeypatch.setenv("KVTOOL_SEED", "5")
    assert effective("eval", "-m", "other") == {"threads": 3}
    assert effective("generate", "-m", "other") == {"threads": 3, "temp": 0.9, "seed": 5}
    file("temp = 0.9\n[eval]\ntemp = 0.5\n[models.other.eval]\nseed = 4\n")
    assert effective("eval", "-m", "other") == {"temp": 0.5, "seed": 4}
    monkeypatch.setenv("KVTOOL_EVAL_SEED", "6")
    assert effective("eval") == {"temp": 0.5, "seed": 6}


def effective(words, *arguments):
    """Return the values of the settings that apply to a command with these arguments, by parameter name."""
    command = dict(settings.all_commands(ROOT))[tuple(words.split())]
    context = command.make_context("x", [], resilient_parsing=True)
    typed, _, _ = command.make_parser(context).parse_args(args=list(arguments))
    applied = settings.of_command(command, tuple(words.split()), typed, ROOT)
    params = {param.name: param for param in command.params}
    return {name: config.converted(params[name], setting) for name, setting in applied.items()}


def test_command_uses_the_top_level_and_its_own_table(file):
    file(FILE.partition("[models")[0])
    assert effective("chat") == {
        **{"budget": "512", "temp": 0.5, "policy": "tova"},
        **{"n": 100, "options": ("window=64",), "seed": 1},
    }
    # perplexity samples no tokens, so it has no options of sampling
    assert effective("perplexity") == {"budget": "512", "policy": "tova"}
    # for a command of two words, both words are the table's name
    assert effective("models show") == {}
    file('[models.show]\nfit = "1G"\n[session.show]\njson = true')
    assert (effective("models show"), effective("session show")) == ({"fit": "1G"}, {"as_json": True})


def test_keys_that_policies_once_had_are_ignored(file, monkeypatch):
    file('budget = "10%"\n[policies]\nbudget = 3\nevict_every = 8\noption = ["stride=4"]\njson = true')
    monkeypatch.setenv("KVTOOL_OPTION", "sinks=1")
    assert effective("policies") == {"as_json": True}
    (buzz,) = json.loads(run_kvtool("policies", "buzz").stdout)
    assert buzz["params"]["stride"] == policies.params(policies.load("buzz"))["stride"]
    assert run_kvtool("config").returncode == 0


def test_paths_may_begin_with_a_tilde(file, monkeypatch):
    home, root = os.path.expanduser("~"), ROOT.make_context("kvtool", [], resilient_parsing=True)

    def parsed(words, *arguments):
        command = dict(settings.all_commands(ROOT))[words]
        return command.make_context(words[-1], [*arguments], parent=root).params

    file("")
    seen = set()
    for words, command in settings.all_commands(ROOT):
        for param in command.params:
            if param.type.name == "path":
                is_option = param.param_type_name == "option"
                typed = (f"{param.opts[0]}=~/a",) if is_option else ("x", "~/a")[param.nargs == 1 :]
                value = parsed(words, *typed)[param.name]
                assert value == (f"{home}/a" if param.nargs == 1 else (f"{home}/a",)), (words, param.name)
                seen.add(param.name)
    assert seen == {
        *("session", "reread", "transcript", "api_key_file", "sessions", "archive_file"),
        *("records", "plot", "html", "file", "files"),
    }
    monkeypatch.setenv("KVTOOL_RECORDS", "~/b")
    file('[chat]\nsession = "~/talk.kv"\nsystem = "~"')
    assert parsed(("compare",))["records"] == f"{home}/b"
    assert [parsed(("chat",))[name] for name in ("session", "system")] == [f"{home}/talk.kv", "~"]


def test_model_table_overrides_command_table(file):
    assert effective("chat")["temp"] == 0.25
    assert effective("generate")["temp"] == 0.125
    assert effective("generate")["n_ctx"] == 4096
    # The model may be named in an option, an argument, a variable or the file. The name may also be the path
    # of the model's file.
    for arguments in (["-m", "other"], ["other"], ["-m", "/some/where/other.gguf"]):
        assert effective("chat", *arguments)["temp"] == 0.75
    file('model = "other"\n' + FILE)
    assert effective("chat")["temp"] == 0.75


@pytest.mark.parametrize("ending", ["", ".gguf"])
def test_model_table_may_be_named_after_the_model_file(file, ending):
    from kvtool.models.catalogue import registry

    file(f'[models."{registry()["smollm2-135m"].path.stem}{ending}"]\ntemp = 0.0625')
    assert effective("chat", "-m", "smollm2-135m")["temp"] == 0.0625
    assert effective("chat", "-m", f"/somewhere/{registry()['smollm2-135m'].file}")["temp"] == 0.0625


@pytest.mark.parametrize(
    ("table", "quoted"),
    [
        ("qwen2.5-coder-0.5b", '"qwen2.5-coder-0.5b"'),
        ("qwen2.5-coder-0.5b.chat", '"qwen2.5-coder-0.5b".chat'),
        ("SmolLM2-135M.Q4_1", '"SmolLM2-135M.Q4_1"'),
        ("a.1.2.3.4.5", '"a.1.2.3.4.5"'),
    ],
)
def test_model_name_with_dots_has_to_be_quoted(file, table, quoted):
    for values in ("ctx-size = 4096", ""):
        path = file(f"[models.{table}]\n{values}")
        for command in (("perplexity", path), ("config",), ("config", "perplexity"), ("models", "list")):
            assert_one_line(
                run_kvtool(*command),
                2,
                f"is not a command; if this is a model's name, quote it: [models.{quoted}]\n",
            )
        assert problems(f"{path}: [models.") == ['$EDITOR "$(kvtool config --path)"']
    file(f"[models.{quoted}]\ntemp = 0.5")
    assert run_kvtool("config").returncode == 0


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("smollm2-135", " Did you mean smollm2-135m or "),
        ("foo", ""),
        ("foo.gguf", ""),
        ("smollm2-135m", None),
        ("hf:owner/name", None),
        ("list", None),
    ],
)
def test_config_and_doctor_report_tables_of_unknown_models(file, name, hint):
    path = file(f'[models."{name}"]\njson = true\n')
    done, report = run_kvtool("config", "--json"), run_kvtool("doctor", "--json").stderr
    assert (done.returncode, done.stderr) == (0, report)
    if hint is None:
        assert not report
        return
    shown = name if name.isidentifier() or "." not in name else f'"{name}"'
    line = f"kvtool: {path}: [models.{shown}] is for no model known here, only for a file "
    assert report.startswith(f"{line}{name.removesuffix('.gguf')}.gguf.{hint}")
    assert report.count("\n") == 1


def test_variables_override_the_file_and_command_variables_override_both(file, monkeypatch):
    monkeypatch.setenv("KVTOOL_TEMP", "0.9")
    monkeypatch.setenv("KVTOOL_CHAT_SEED", "3")
    assert (effective("chat")["temp"], effective("generate")["temp"], effective("chat")["seed"]) == (
        0.9,
        0.9,
        3,
    )
    monkeypatch.setenv("KVTOOL_CHAT_TEMP", "0.1")
    monkeypatch.setenv("KVTOOL_CHAT_SEED", "")
    assert (effective("chat")["temp"], effective("generate")["temp"], effective("chat")["seed"]) == (
        0.1,
        0.9,
        1,
    )


def test_aliases_set_options_in_the_file_and_in_variables(file, monkeypatch):
    file("max_new_tokens = 7\n[chat]\ntemperature = 0.5\nn-gpu-layers = 3")
    assert effective("chat") == {"n": 7, "temp": 0.5, "gpu_layers": 3}
    monkeypatch.setenv("KVTOOL_NUM_PREDICT", "8")
    monkeypatch.setenv("KVTOOL_CHAT_N_PREDICT", "9")
    assert (effective("generate")["n"], effective("chat")["n"]) == (8, 9)
    # the variable with the option's own name has priority
    monkeypatch.setenv("KVTOOL_PREDICT", "10")
    assert effective("generate")["n"] == 10
    file("temp = 0.25\ntemperature = 0.5")
    with pytest.raises(UsageError, match="temp and temperature set the same option"):
        effective("chat")


def test_short_names_set_options_in_the_file_and_in_variables(file, monkeypatch):
    file("t = 2\nfa = 'on'\n[generate]\nc = 100")
    assert effective("generate") == {"threads": 2, "flash": "on", "n_ctx": 100}
    file("")
    for name, value in {"T": "3", "FA": "off", "GENERATE_C": "200", "GENERATE_N": "4", "CTK": "q8_0"}.items():
        monkeypatch.setenv(f"KVTOOL_{name}", value)
    assert effective("generate") == {"threads": 3, "flash": "off", "n_ctx": 200, "n": 4, "type_k": "q8_0"}
    assert not run_kvtool("config").stderr


def test_policy_parameters_apply_only_to_the_policy_set_with_them(file, monkeypatch):
    assert effective("chat")["options"] == ("window=64",)
    assert "options" not in effective("chat", "--policy", "h2o")
    monkeypatch.setenv("KVTOOL_POLICY", "h2o")
    assert "options" not in effective("chat")
    monkeypatch.setenv("KVTOOL_OPTION", "sinks=2 window=8")
    assert effective("chat")["options"] == ("sinks=2", "window=8")


def test_option_variables_differ_from_other_kvtool_variables():
    for words, command in settings.all_commands(ROOT):
        for param in settings.options_of(command):
            names = {*settings.variables(param), *settings.variables(param, words)}
            assert not names & set(settings.NOT_OPTIONS), param.opts


def test_typed_options_override_settings_and_settings_take_effect(file, tiny_model, monkeypatch):
    def fit(*arguments):
        return json.loads(run_kvtool("models", "show", tiny_model(), *arguments).stdout)["fit_bytes"]

    file('[models.show]\njson = true\nfit = "1G"')
    assert (fit(), fit("--fit", "2G")) == (2**30, 2**31)
    monkeypatch.setenv("KVTOOL_MODELS_SHOW_FIT", "3G")
    assert (fit(), fit("--fit", "2G")) == (3 * 2**30, 2**31)


def test_budget_from_a_setting_is_ignored_by_full(file, tmp_path):
    file("budget = 512")
    assert_one_line(run_kvtool("perplexity", "missing.txt", "--policy", "full"), 5)
    full = "chat", "-m", "no-such-model", "--policy", "full"
    assert_one_line(run_kvtool(*full), 3, "unknown model")
    assert_one_line(run_kvtool(*full, "--budget", 12), 2, "takes no --budget")


def test_config_keys_of_other_commands_import_none_of_them(file):
    file("seed = 1\ntemp = 0.5\nstop = []\nmirostat = 2")
    code = (
        "import sys\n"
        "from kvtool.cli import app\n"
        "try: app(['perplexity', 'missing.txt'])\n"
        "except SystemExit as end: print(end.code, 'kvtool.cli.worker' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "5 False\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("budge = 5", "config.toml: budge is not an option. Did you mean budget"),
        ("[chat]\nbudge = 5", "[chat] budge is not an option. Did you mean budget"),
        # `raw` is an option of `generate`, but not of `chat`
        ("[chat]\nraw = true", "[chat] raw is not an option"),
        ("[chta]\ntemp = 1", "[chta] is not a command. Did you mean chat"),
        ("[chat.more]\ntemp = 1", "[chat.more] is not a command"),
        ('temp = "hot"', "config.toml: temp must be a number, got 'hot'"),
        ("temprature = 0.5", "config.toml: temprature is not an option. Did you mean temp?"),
        ("[chat]\nseed = 1.5", "[chat] seed must be a whole number, got '1.5'"),
        ("seed = true", "seed must be a whole number, got 'true'"),
        ("seed = [1]", "seed must be one value, got [1]"),
        ("policy = true", "policy must be a text, got true"),
        ("explain = 2", "explain: '2' is not a valid boolean. Recognized values: 0, 1, "),
        ("[chat]\nn = 0", "[chat] n must be at least 1, or -1 for no limit, got 0"),
        ("batch-size = 0", "config.toml: batch-size must be at least 1, got 0"),
        ("[chat]\nn = 5\npredict = 6", "[chat] n and predict set the same option; remove one of them"),
        ("top_k = 5\ntop-k = 6", "config.toml: top_k and top-k set the same option"),
        ('[models."smollm2-135m"]\nmodel = "x"', "cannot name another model"),
        ('[models."smollm2-135m"]\nbudge = 1', "[models.smollm2-135m] budge is not an option"),
        ("budget = ", "config.toml is not TOML: "),
        pytest.param(f"budget = {'9' * 5000}", "config.toml has a number of too many digits", id="digits"),
        pytest.param(f"budget = {'[' * 3000}", "or too many nested brackets", id="brackets"),
        ("[models.x.session.show.more]", "a table's name has at most 4 parts"),
        pytest.param(f"[models{'.a' * 3000}]", "[models.a.a] is not a command; ", id="table"),
    ],
)
def test_wrong_key_or_value_gets_one_line_with_file_and_key(file, text, words):
    path, done = file(text), run_kvtool("chat")
    assert_one_line(done, 2, words)
    assert done.stderr.startswith(f"kvtool: {path}")
    # kvtool config finds all errors that can be found without running a command
    if "n = 0" not in text and "size" not in text and "another" not in text:
        assert run_kvtool("config").returncode == 2
    # help works with any settings
    assert kvtool("chat", "-h").returncode == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[generate]\nbudge = 5", "[generate] budge is not an option. Did you mean budget"),
        ("[session.shwo]\njson = true", "[session.shwo] is not a command"),
        ("[models.x.chta]\ntemp = 1", "[models.x.chta] is not a command"),
        ('[models.x.models.shwo]\nfit = "1G"', "[models.x.models.shwo] is not a command"),
        ("[models.x.chat]\nraw = true", "[models.x.chat] raw is not an option"),
    ],
)
def test_config_checks_the_tables_of_all_commands(file, text, words):
    file(text)
    assert_one_line(run_kvtool("config"), 2, words)


@pytest.mark.parametrize(
    ("table", "command"),
    [
        ("models.x.models.list", "models list"),
        ("models.x.policies", "policies"),
        ("models.x.doctor", "doctor"),
    ],
)
def test_model_table_for_a_command_without_a_model_is_refused(file, table, command):
    path = file(f"[{table}]\njson = true")
    line = f"kvtool: {path}: [{table}] never applies: `kvtool {command}` has no -m\n"
    assert_one_line(run_kvtool("config", "--json"), 2, line)
    with pytest.raises(UsageError, match="never applies"):
        effective(command)


def test_error_names_the_variable_that_set_the_value(file, monkeypatch):
    monkeypatch.setenv("KVTOOL_CHAT_SEED", "x")
    assert_one_line(run_kvtool("chat"), 2, "kvtool: $KVTOOL_CHAT_SEED must be a whole number, got 'x'\n")


def test_error_names_the_setting_of_an_option_that_was_not_typed(file):
    path = file("[chat]\nevict-every = 16")
    line = f"(--evict-every is set by {path}: [chat] evict-every)"
    assert_one_line(run_kvtool("chat", "--budget", 8), 2, line)


def test_error_about_a_model_names_the_setting_that_chose_it(file, monkeypatch, tmp_path):
    path = file('model = "nope"')
    line = "kvtool: unknown model 'nope' (and no such file). See `kvtool models list`."
    of_file = f" (--model is set by {path}: model)\n"
    for command in (("generate", "hi"), ("chat",), ("perplexity", path), ("bench",), ("serve",)):
        assert_one_line(kvtool(*command), 3, line + of_file)
    monkeypatch.setenv("KVTOOL_MODEL", "nope")
    assert_one_line(run_kvtool("generate", "hi"), 3, f"{line} (--model is set by $KVTOOL_MODEL)\n")
    (tmp_path / "empty.gguf").touch()
    monkeypatch.setenv("KVTOOL_MODEL", str(tmp_path / "empty.gguf"))
    assert_one_line(
        run_kvtool("generate", "hi"),
        3,
        "empty.gguf is empty; download it again (--model is set by $KVTOOL_MODEL)\n",
    )
    # if the model was typed, the error names no setting
    monkeypatch.setenv("KVTOOL_MODEL", "nope")
    for command in (("generate", "hi", "-m", "nope"), ("chat", "nope")):
        assert_one_line(run_kvtool(*command), 3, f"{line}\n")


def test_values_have_the_same_types_from_the_file_and_from_variables(file, monkeypatch):
    def values(*words):
        rows = json.loads(run_kvtool("config", *words, "--json").stdout)["settings"]
        return {row["option"]: row["value"] for row in rows if row["source"] != "default"}

    same = {
        **{"--policy": "h2o", "--budget": "512", "--option": ["window=64", "sinks=2"], "--json": True},
        **{"--threads": 2, "--temp": 0.5, "--gpu-layers": "auto", "--verbose": 1},
    }
    file(
        'policy = "h2o"\nbudget = 512\noption = ["window=64", "sinks=2"]\njson = true\nthreads = 2\n'
        'temp = 0.5\ngpu-layers = "auto"\nverbose = true'
    )
    assert values() == values("generate") == same
    file("")
    texts = {"option": "window=64 sinks=2", "json": "yes", "threads": "2", "temp": "0.5", "verbose": "1"}
    for name, text in {"policy": "h2o", "budget": "512", "gpu_layers": "auto", **texts}.items():
        monkeypatch.setenv(f"KVTOOL_{name.upper()}", text)
    assert values() == values("generate") == same


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flash-attn = true", "flash-attn must be on, off or auto, got 'true'"),
        ("stop-loops = false", "stop-loops must be on or off, got 'false'"),
        ("think = true", "think must be one of on, off, minimal, low, medium, high, xhigh, max, got 'true'"),
    ],
)
def test_value_of_the_file_is_refused_with_the_words_that_the_option_accepts(file, text, words):
    path = file(text)
    assert_one_line(run_kvtool("config"), 2, f"{path}: {words}")
    assert_one_line(run_kvtool("chat", "-m", "nope"), 2, f"--{words} (--{text.split()[0]} is set by {path}: ")


def test_settings_that_no_policy_can_run_with_are_refused(file, monkeypatch):
    edit = ['$EDITOR "$(kvtool config --path)"']

    def refused(line, remedies):
        for command in (("config",), ("config", "chat"), ("config", "perplexity")):
            assert_one_line(run_kvtool(*command), 2, line)
        assert problems(line) == remedies

    path = file('option = ["window"]')
    refused(f"-o takes name=value, got 'window' (--option is set by {path}: option)", edit)
    path = file('policy = "h2o"\noption = ["foo=1"]')
    refused("h2o: there is no parameter 'foo' (-o); its parameters: window, ", edit)
    path = file('policy = "h2o"\nbudget = 1\n')
    line = "a budget of 1 is too small for h2o; use at least 2 "
    refused(f"{line}(--policy is set by {path}: policy; --budget is set by {path}: budget)", edit)
    # a table of a model is checked as well
    file('[models."smollm2-135m"]\npolicy = "h2o"\n[models."smollm2-135m".chat]\nbudget = 1')
    assert_one_line(run_kvtool("config"), 2, line)
    file("")
    monkeypatch.setenv("KVTOOL_OPTION", "window")
    refused("-o takes name=value, got 'window' (--option is set by $KVTOOL_OPTION)", ["unset KVTOOL_OPTION"])
    monkeypatch.delenv("KVTOOL_OPTION")
    monkeypatch.setenv("KVTOOL_BUDGET", "0")
    refused("a budget of 0 is too small for recall; use at least ", ["unset KVTOOL_BUDGET"])
    # a size in bytes or a share depends on the model, and `full` takes no budget
    for budget in ("1KiB", "0.001%"):
        monkeypatch.setenv("KVTOOL_BUDGET", budget)
        assert run_kvtool("config").returncode == 0
    monkeypatch.setenv("KVTOOL_BUDGET", "0")
    monkeypatch.setenv("KVTOOL_POLICY", "full")
    assert run_kvtool("config").returncode == 0


def test_models_show_uses_the_model_of_a_setting(file, monkeypatch):
    for text in ('model = "nope"', 'm = "nope"', '[models.show]\nmodel = "nope"'):
        path = file(text)
        assert_one_line(run_kvtool("models", "show"), 3, "unknown model 'nope' (and no such file). See")
        (row,) = json.loads(run_kvtool("config", "models", "show", "--json").stdout)["settings"][:1]
        assert (row["option"], row["value"], row["source"].startswith(f"{path}: ")) == ("model", "nope", True)
    monkeypatch.setenv("KVTOOL_M", "other")
    assert_one_line(run_kvtool("models", "show"), 3, "unknown model 'other'")
    assert_one_line(run_kvtool("models", "show", "typed"), 3, "unknown model 'typed'")


def test_config_file_named_by_the_variable_must_exist(file, monkeypatch, tmp_path):
    monkeypatch.setenv("KVTOOL_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="does not exist"):
        settings.read()
    monkeypatch.setenv("KVTOOL_CONFIG", os.devnull)
    assert settings.read()[0] == {}


def test_unreadable_config_file_gets_one_line_that_names_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("KVTOOL_CONFIG", str(tmp_path))
    with pytest.raises(UsageError, match=r"^cannot read .*; name another file in \$KVTOOL_CONFIG$"):
        settings.read()


@pytest.mark.skipif(sys.platform != "linux", reason="says where Linux has it")
def test_config_file_is_in_xdg_config_home(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "KVTOOL_CONFIG"}
    done = kvtool("config", "--path", env={**env, "XDG_CONFIG_HOME": str(tmp_path)})
    assert done.stdout == f"{tmp_path}/kvtool/config.toml\n"
    assert kvtool("config", env={**env, "XDG_CONFIG_HOME": str(tmp_path)}).stdout.startswith("file: ")


def test_config_shows_each_setting_and_its_source(file, monkeypatch):
    path = file(FILE)
    monkeypatch.setenv("KVTOOL_CHAT_SEED", "3")
    monkeypatch.setenv("KVTOOL_BUDGTE", "4")
    # `kvtool config` ignores this variable for its own -m
    monkeypatch.setenv("KVTOOL_MODEL", "hf:a/other")
    done = run_kvtool("config", "--json")
    rows = json.loads(done.stdout)["settings"]
    assert {"command": "all", "option": "--budget", "value": "512", "source": f"{path}: budget"} in rows
    assert {"command": "all", "option": "--model", "value": "hf:a/other", "source": "$KVTOOL_MODEL"} in rows
    assert {"command": "chat", "option": "--seed", "value": 3, "source": "$KVTOOL_CHAT_SEED"} in rows
    assert [row["value"] for row in rows if row["command"] == "models smollm2-135m generate"] == [0.125]
    assert done.stderr.startswith(
        "kvtool: $KVTOOL_BUDGTE does not belong to an option. Did you mean KVTOOL_BUDGET "
    )


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("KVTOOL_N_PREDIKT", " Did you mean KVTOOL_PREDICT?"),
        ("KVTOOL_PARALEL", " Did you mean KVTOOL_PARALLEL?"),
        ("KVTOOL_FOO", ""),
    ],
)
def test_every_command_reports_unknown_variables(file, monkeypatch, name, instead):
    file("")
    monkeypatch.setenv(name, "4")
    # These two variables cause no message, because they belong to options: --json of the commands below, and
    # --port of `serve`.
    monkeypatch.setenv("KVTOOL_JSON", "true")
    monkeypatch.setenv("KVTOOL_SERVE_PORT", "8000")
    for command in (["models", "list"], ["config"], ["config", "chat"]):
        done = run_kvtool(*command)
        assert done.returncode == 0
        assert done.stderr == f"kvtool: ${name} does not belong to an option.{instead}\n"
    assert not kvtool("chat", "-h").stderr


REFUSED = {
    "ALLOW_ORIGIN": ("a.b", 2, "must be like https://example.com"),
    "API_KEY_FILE": ("banana", 5, "cannot read banana: No such file or directory"),
    "ARCHIVE": ("banana", 2, "--archive is a number of tokens (20000) or bytes (2GiB), got 'banana'"),
    "ARCHIVE_FILE": ("/", 2, "--archive-file '/' is a folder; name a new file"),
    "BUDGET": ("12 bananas", 2, "a budget is a number of tokens (512), "),
    "CHAT_TEMPLATE": ("/banana", 5, "cannot read /banana: No such file or directory"),
    "CHECKPOINTS": ("banana", 2, "a size is a number with a unit "),
    "DRAFT": ("banana", 3, "unknown model 'banana'"),
    "HOST": ("::1", 2, "the host must be a name or an IPv4 address, got ::1"),
    "LORA": ("/banana", 3, "there is no adapter /banana; "),
    "MODEL": ("banana", 3, "unknown model 'banana' (and no such file)."),
    "POLICY": ("h20", 2, "unknown policy 'h20'. Did you mean h2o?"),
    "RPC": ("banana", 2, "a worker is host:port, host:50052 for example, got 'banana'"),
    "SESSIONS_BYTES": ("5 bananas", 2, "a size is a number with a unit "),
    "SYSTEM_FILE": ("banana", 5, "cannot read banana: No such file or directory"),
    "TENSOR_SPLIT": ("0", 2, "--tensor-split needs a share above 0, got '0'"),
}
"""Values that `kvtool serve` refuses: the exit code, and the end of the message."""


@pytest.mark.parametrize("name", REFUSED)
def test_config_and_doctor_refuse_the_values_that_a_command_refuses(file, monkeypatch, name):
    value, exit_code, words = REFUSED[name]
    key = name.lower().replace("_", "-")

    def refusal(source):
        for command in (("config",), ("config", "serve")):
            done = run_kvtool(*command)
            assert_one_line(done, exit_code, words)
            assert done.stderr.startswith(f"kvtool: {source}")
        # without the model, `serve` cannot come to these options
        if name not in ("DRAFT", "LORA"):
            done = kvtool("serve")
            assert_one_line(done, exit_code, words)
            assert f"(--{key} is set by {source})" in done.stderr

    path = file(f"[serve]\n{key} = '{value}'")
    refusal(f"{path}: [serve] {key}")
    assert problems(f"{path}: [serve] {key}") == ['$EDITOR "$(kvtool config --path)"']
    file("")
    monkeypatch.setenv(f"KVTOOL_{name}", value)
    refusal(f"$KVTOOL_{name}")
    assert problems(f"$KVTOOL_{name}") == [f"unset KVTOOL_{name}"]


@pytest.mark.parametrize(
    ("command", "name", "value", "words"),
    [
        ("bench", "DEPTHS", "banana", "--depths takes numbers of tokens"),
        ("compare", "POLICIES", "h2o,h20", "unknown policy 'h20'"),
        ("compare", "BUDGETS", "128,banana", "a budget is a number of tokens (512), "),
        ("compare", "TYPES", "f17", "--types must name some of "),
        ("generate", "FILE", "banana", "cannot read banana"),
        ("generate", "FILE", "/", "cannot read /: Is a directory"),
        ("models_show", "FIT", "banana", "a size is a number with a unit "),
        ("models_show", "DEVICE", "1KiB", "--device is the memory of a GPU"),
        ("worker", "MEM", "0", "--mem must be above 0"),
        ("chat", "STOP", "banana", None),
        ("chat", "TOP_P", "7", "$KVTOOL_CHAT_TOP_P must be in 0..1, got 7"),
        ("chat", "PLAIN", "perhaps", "$KVTOOL_CHAT_PLAIN: 'perhaps' is not a valid boolean. "),
        ("chat", "POSITIONS", "nowhere", "$KVTOOL_CHAT_POSITIONS must be "),
        ("chat", "LOGIT_BIAS", "5+99999999999", "--logit-bias of token 5 must be in "),
    ],
)
def test_config_checks_options_of_other_commands(file, monkeypatch, command, name, value, words):
    file("")
    variable = f"KVTOOL_{command.upper()}_{name}"
    monkeypatch.setenv(variable, value)
    assert problems(f"${variable}") == ([f"unset {variable}"] if words else [])
    for arguments in (("config",), ("config", *command.split("_"))):
        done = run_kvtool(*arguments)
        assert (done.returncode == 0) == (words is None)
        assert words is None or words in done.stderr


def test_argument_that_names_a_model_replaces_the_model_of_a_setting(file, tmp_path):
    file('model = "banana"')
    assert_one_line(run_kvtool("chat", tmp_path / "none.gguf"), 3, f"there is no file {tmp_path}/none.gguf\n")


def test_doctor_lists_all_mistakes_of_the_file_and_the_variables(file, monkeypatch):
    path = file(
        'parallel = "x"\nqueue = 0\n[banana]\n[models.a.generate]\ntop-p = 7\n[serve]\nprot = 1\nport = -1'
    )
    monkeypatch.setenv("KVTOOL_POLICY", "banana")
    problems = [problem["wrong"] for problem in json.loads(run_kvtool("doctor", "--json").stdout)["problems"]]
    starts = (
        f"{path}: parallel must be a whole number, got 'x'",
        f"{path}: queue must be at least 1, got 0",
        f"{path}: [banana] is not a command.",
        f"{path}: [models.a.generate] top-p must be in 0..1, got 7",
        f"{path}: [serve] prot is not an option. Did you mean ",
        f"{path}: [serve] port must be in 0..65535, got -1",
        "$KVTOOL_POLICY: unknown policy 'banana'.",
    )
    mistakes = [problem for problem in problems if re.search("config|KVTOOL_", problem)]
    assert len(mistakes) == len(starts)
    assert all(each.startswith(start) for each, start in zip(mistakes, starts, strict=True))
    assert not any("\n" in mistake for mistake in mistakes)


def test_pipe_is_not_read_while_options_are_checked(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # this would wait for a writer if it opened the pipe
    check_file(str(pipe))
    (tmp_path / "text").write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not UTF-8"):
        check_file(str(tmp_path / "text"))


def test_commands_that_help_to_repair_settings_run_with_wrong_ones(file, monkeypatch):
    for text, words in (("budget =", " is not TOML"), ("[doctor]\njson = 5", ": [doctor] json: '5' is not")):
        path = file(text)
        assert_one_line(run_kvtool("config"), 2, f"{path}{words}")
        done = run_kvtool("config", "--path")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")
        assert problems(f"{path}{words}") == ['$EDITOR "$(kvtool config --path)"']
    # doctor checks the options of all commands
    path = file("[chat]\ntop-p = 7")
    assert problems(f"{path}: [chat] top-p must be") == ['$EDITOR "$(kvtool config --path)"']
    file("")
    assert problems("") == []
    monkeypatch.setenv("KVTOOL_CHAT_TOP_P", "7")
    assert problems("$KVTOOL_CHAT_TOP_P must be") == ["unset KVTOOL_CHAT_TOP_P"]


def problems(words):
    """Return doctor's remedies for wrong settings. Check that each of these problems begins with `words`."""
    done = run_kvtool("doctor", "--json")
    problems = [
        problem
        for problem in json.loads(done.stdout)["problems"]
        if re.search("config|KVTOOL_", problem["wrong"])
    ]
    assert all(words in problem["wrong"] for problem in problems)
    assert not problems or done.returncode == 1
    return [problem["command"] for problem in problems]


def test_config_shows_the_settings_of_one_command(file):
    path = file(FILE)

    def of(*arguments):
        rows = json.loads(run_kvtool("config", *arguments, "--json").stdout)["settings"]
        return {row["option"]: (row["value"], row["source"]) for row in rows}

    settings = of("chat")
    assert settings["--temp"] == (0.25, f"{path}: [models.smollm2-135m] temp")
    assert settings["--top-k"] == (40, "default")
    assert settings["--option"] == (["window=64"], f"{path}: [chat] option")
    assert of("chat", "-m", "other")["--temp"] == (0.75, f"{path}: [models.other] temp")
    assert run_kvtool("config", "chta").stderr == "kvtool: there is no command 'chta'. Did you mean chat?\n"


def test_the_documented_example_runs_and_an_error_names_the_setting(file):
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    path = file(example)
    settings_of_chat = effective("chat")
    policies.spec(settings_of_chat["policy"], None, settings_of_chat["options"])
    file('[chat]\noption = ["window=64"]')
    words = rf"no parameter 'window' \(-o\); its .* \(--option is set by {path}: \[chat\] option\)"
    done = run_kvtool("chat", "-m", "nope")
    assert done.returncode == 2
    assert re.search(words, done.stderr)


def test_session_options_override_settings_and_typed_options_override_both(file, smol, tmp_path, monkeypatch):
    """The file and the environment apply only to options that the session has not stored."""
    monkeypatch.setenv("KVTOOL_MODEL", str(smol))
    file('budget = 300\ntemp = 0.5\nthreads = 1\nn = 2\n[chat]\nsystem = "Be brief."')
    session_path = tmp_path / "talk.kv"

    def saved():
        with session_path.open("rb") as data:
            return json.loads([data.readline(), data.readline()][1])["options"]

    assert run_kvtool("chat", "--session", session_path, stdin="Hello.\n").returncode == 0
    assert (saved()["budget"], saved()["temp"]) == ("300", 0.5)
    file("budget = 400\ntemp = 0.75\nthreads = 1\nn = 2")
    monkeypatch.setenv("KVTOOL_TOP_K", "7")
    done = run_kvtool("chat", "--session", session_path, "--min-p", 0.25, stdin="Hello.\n")
    assert done.returncode == 0, done.stderr
    now = saved()
    assert (now["budget"], now["temp"], now["top_k"], now["min_p"]) == ("300", 0.5, 40, 0.25)
