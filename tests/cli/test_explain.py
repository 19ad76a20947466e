"""The engine does what --explain and the notices say."""

from __future__ import annotations

import re

import pytest

from kvtool import policies
from kvtool.cli.explain import Notice, _budget, _memory, _prefill, explain_run, long_text, policy_line
from kvtool.config import report
from kvtool.measure import holdings, perplexity
from tests.cli.test_cli import kvtool
from tests.engine.exact_engines import open_engine, random_tokens


def spy(engine):
    """Return a list. Each eviction plan then adds one number to it: how many tokens have been read."""
    evictions, checked = [], engine.cache.check

    def check(view, plan):
        evictions.append(engine.n_past)
        return checked(view, plan)

    engine.cache.check = check
    return evictions


@pytest.mark.parametrize("n_text", [0, 20, 32, 40, 150])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("h2o", {}),
        ("h2o", {"n_batch": 20}),
        ("h2o", {"n_batch": 10}),
        ("buzz", {"n_batch": 20}),
        ("tova", {"n_batch": 7, "prefill": "whole"}),
        ("snapkv", {"n_batch": 64}),
        ("corm", {"n_batch": 20}),
    ],
)
def test_first_plan_predicts_the_first_eviction(tiny_model, name, settings, n_text):
    tokens = random_tokens(260)
    with open_engine(tiny_model(), policies.fit(name, 32, 4), **settings) as engine:
        evictions = spy(engine)
        first = engine.first_plan(n_text)
        if n_text:
            engine.read(tokens[:n_text])
        while not evictions:
            engine.evict_if_due()
            if not evictions:
                engine.step(tokens[engine.n_past : engine.n_past + 1])
        assert evictions[0] == first


@pytest.mark.parametrize("name", ["h2o", "corm"])
def test_first_plan_predicts_the_first_eviction_of_a_scored_text(tiny_model, name):
    with open_engine(tiny_model(), policies.fit(name, 32, 4), over_budget=False) as engine:
        evictions = spy(engine)
        perplexity.stream(engine, random_tokens(80))
        assert evictions[0] == engine.first_plan(80)


@pytest.mark.parametrize("n", [31, 32, 33, 48, 49])
@pytest.mark.parametrize(
    ("name", "params", "settings"),
    [
        ("h2o", [], {}),
        ("corm", [], {}),
        ("buzz", ["kept=true"], {}),
        ("recall", [], {}),
        ("h2o", [], {"prefill": "whole"}),
    ],
)
def test_a_text_that_fits_is_reported_if_nothing_follows_it(tiny_model, capsys, name, params, settings, n):
    policy = policies.fit(name, 48 if name == "recall" else 32, 4, params)
    with open_engine(tiny_model(), policy, over_budget=False, **settings) as engine:
        explain_run(engine, name, "text", n, is_all=True)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eviction")]
        evictions = spy(engine)
        holdings.watch(engine, random_tokens(n))
        assert ("never: the text fits" in line) == (not evictions)
        # the later tokens of a chat may still need an eviction
        explain_run(engine, name, "text", n)
        assert "never" not in capsys.readouterr().err


def test_full_has_no_first_plan(tiny_model):
    with open_engine(tiny_model(), policies.fit("full", 32)) as engine:
        assert engine.first_plan() is None


@pytest.mark.parametrize(
    "shape", [{}, {"arch": "gemma3", "window": 80}, {"arch": "lfm2"}], ids=["llama", "sliding", "recurrent"]
)
def test_large_cache_takes_the_predicted_bytes(tiny_model, shape):
    with open_engine(tiny_model(**shape), policies.fit("h2o", 32, 8), prefill="whole") as engine:
        most = []
        engine.read(random_tokens(300), lambda: most.append((engine.cache_bytes, engine.signal_bytes)))
        assert max(most) == (engine.whole_reader.n_bytes(300), engine.whole_reader.signal_bytes(300))
        assert most[-1] > (engine.cache_bytes, engine.signal_bytes)


@pytest.mark.parametrize("name", policies.names())
@pytest.mark.parametrize("pinned", [0, 3, 100])
def test_the_parts_of_a_budget_add_up(name, pinned):
    policy = policies.fit(name, 128, None if name == "full" else 16)
    pinned = min(pinned, policy.n_keep) if policy.recall else pinned
    parts = policy.split(pinned)
    recalled = ["recalled"] if policy.recall else []
    assert list(parts) == ["sinks", "pinned", "window", "rest", "slack", *recalled]
    assert sum(parts.values()) == 128
    assert min(parts.values()) >= 0
    assert parts["sinks"] + parts["pinned"] == max(pinned, getattr(policy, "sinks", 0))


def test_positions_restart_at_the_announced_token(tiny_model, capsys):
    with open_engine(tiny_model(), policies.fit("local", 32, 8), n_ctx=64) as engine:
        explain_run(engine, "local", "prompt")
        assert (
            "auto: as original, until the context of 64 tokens is full; then gaps are closed"
            in capsys.readouterr().err
        )
        for token in random_tokens(65):
            assert not engine.n_restart
            engine.step(token[None])
        assert engine.n_restart


@pytest.mark.parametrize(
    ("name", "settings", "n", "words"),
    [
        ("h2o", {}, 32, None),
        ("h2o", {}, 64, ["the prompt has 64 tokens", "at most 32 of them (50 %)", "a larger --budget keeps"]),
        ("h2o", {"positions": "original", "n_ctx": 60}, 64, ["positions end at 60: reading stops there"]),
        ("h2o", {"prefill": "whole"}, 1000, ["32 of them (3 %)", "a cache of 1.0 MiB and 16.0 KiB of"]),
        ("h2o", {"prefill": "whole", "n_ctx": 60}, 150, ["in 3 parts that do not see each other"]),
        ("h2o", {"prefill": "whole", "n_ctx": 60, "positions": "original"}, 150, ["cannot be read whole"]),
        ("full", {}, 33, ["(33 tokens) does not fit in the cache (32)", "reading stops when"]),
        ("h2o", {}, 640_000, ["(0.005 %)"]),
    ],
)
def test_notice_announces_a_text_that_will_be_partly_forgotten(tiny_model, capsys, name, settings, n, words):
    policy = policies.fit(name, 32, None if name == "full" else 8)
    with open_engine(tiny_model(), policy, **settings) as engine:
        line = long_text(engine, "prompt", n)
        assert (line is None) == (words is None)
        notice = Notice(engine, "prompt")
        notice(32)
        assert capsys.readouterr().err == ""
        notice(n)
        assert capsys.readouterr().err == (f"{line}\n" if words else "")
        # the notice is printed again each time that a text is partly forgotten
        notice(n)
        assert capsys.readouterr().err == (f"{line}\n" if words and name == "h2o" else "")
        notice(n, is_explained=True)
        assert capsys.readouterr().err == ""
    for word in words or []:
        assert word in line


def test_generate_explain_prints_to_stderr_and_still_answers(tiny_model):
    done = kvtool(
        *("generate", "--raw", "-m", tiny_model(), "--policy", "streamingllm", "--budget", 64, "-b", 24),
        *("--evict-every", 8, "-n", 3, "--temp", 0, "-t", 1, "--explain", "-p", "Go on: "),
        stdin="word " * 40,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    lines = dict(line.split(maxsplit=1) for line in done.stderr.splitlines())
    assert lines["policy"] == "streamingllm sinks=4"
    assert lines["rows"] == "4: 2 layers of 2 KV heads"
    assert lines["budget"] == "64 cells per row = 4 sinks + 3 pinned + 49 window + 8 slack"
    # batches have 24 tokens, so the third batch exceeds the budget of 64
    assert lines["eviction"] == "first after 72 tokens"
    assert lines["prefill"].startswith("stream: in batches of up to 24 tokens; the prompt has ")
    assert set(lines) == {"policy", "rows", "budget", "memory", "eviction", "positions", "prefill"}


@pytest.mark.parametrize(
    ("template", "options", "what"),
    [
        ("a text", ["-p", "Go on: "], "the prompt"),
        ("{{ messages[-1].content[:3] }}", ["--system", "Be brief."], "the system prompt"),
        ("{{ messages[0].content }}", ["--system", "Be brief."], None),
        ("{{ messages[-1].content }}", ["-p", "Go on: "], None),
        ("{{ messages[-1].content[:3] }}", ["--system", "Be brief.", "--policy", "full"], None),
    ],
)
def test_generate_warns_about_text_that_it_cannot_pin(tiny_model, template, options, what):
    path = tiny_model(chat_template=template)
    done = kvtool("generate", "-m", path, "-n", 1, "-t", 1, *options, stdin="word " * 9)
    assert done.returncode == 0, done.stderr
    words = f"{what} may be evicted: the model's chat template leaves it out, cuts it or moves it\n"
    assert done.stderr == (words if what else "")


@pytest.mark.parametrize("command", ["generate", "chat", "perplexity"])
def test_commands_report_once_per_text_how_much_is_kept(smol, tmp_path, command):
    (tmp_path / "text").write_text("The tide came in. " * 30)
    line = "The tide came in. " * 12 + "\n"
    arguments = {"perplexity": [tmp_path / "text"]}.get(command, ["-n", 1, "--temp", 0, "-b", 32])
    options = ["-m", smol, "--policy", "h2o", "--budget", 32, "-t", 1]
    done = kvtool(command, *arguments, *options, stdin=2 * line)
    assert done.returncode == 0, done.stderr
    n_text = 2 if command == "chat" else 1
    assert done.stderr.count("each KV head keeps at most 32 of them") == n_text
    what = {"generate": "prompt", "chat": "turn", "perplexity": "text"}[command]
    assert f"the {what} has " in done.stderr


@pytest.mark.parametrize(
    ("system", "turns", "noun"),
    [
        ("word " * 60, ["one", "two"], "system prompt with the first turn"),
        ("Be brief.", ["one", "word " * 60], "turn"),
        (None, ["word " * 60], "turn"),
    ],
)
def test_chat_says_if_the_tokens_of_a_turn_include_the_system_prompt(talker, system, turns, noun):
    options = ("-m", talker, "-n", 1, "-t", 1, "--budget", 64, *(("--system", system) if system else ()))
    done = kvtool("chat", *options, stdin="".join(f"{turn}\n" for turn in turns))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^the (.*) has \d+ tokens: at most 64 of them", done.stderr, re.M) == [noun]


def test_explain_shows_recalls_budget_parameters_and_batches(tiny_model):
    with open_engine(tiny_model(), policies.fit("recall", 64, 8)) as engine:
        n_synthetic = engine.policy.recall.n_cell
        assert (
            _budget(engine)
            == f"64 cells per row = 4 sinks + {52 - n_synthetic} window + 8 slack + {n_synthetic} recalled"
        )
        assert policy_line(engine, "recall") == "recall exact=256 sinks=4 chunk=16 search=clusters"
        assert _prefill(engine) == (
            "stream: in batches of up to 16 tokens (recall's `chunk`) once tokens are archived"
        )
    with open_engine(tiny_model(), policies.fit("recall", 48, 16, ["search=all"])) as engine:
        assert policy_line(engine, "recall") == "recall sinks=4 chunk=16 search=all"


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("recall", "q8_0", "q8_0"),
        ("recall", "q5_0/q4_0", "q5_0/q4_0"),
        # an archive of an old session
        ("recall", "plain q4_1", "q4_1"),
        ("h2o", "q8_0", None),
    ],
)
def test_explain_and_reports_name_the_archive_type(tiny_model, name, kind, expected):
    with open_engine(tiny_model(), policies.fit(name, 64, 8), archive_type=kind) as engine:
        assert report.report(engine, name)["archive_type"] == expected
        assert (f" as {expected}) in host memory" in _memory(engine)) == (expected is not None)


def test_reports_tell_recalled_cells_from_the_tokens_that_rows_hold(tiny_model):
    with open_engine(tiny_model(), policies.fit("recall", 64, 8)) as engine:
        n_recalled = engine.policy.recall.n_cell
        engine.read(random_tokens(300))
        record = report.report(engine, "recall")
        assert record["held"] + record["archived"] == engine.n_past == 300
        assert record["cells"] == record["held"] + n_recalled
        assert f"/64 cells per row ({n_recalled} recalled), cache " in report.line(record)


def test_explain_says_that_batches_of_scored_texts_end_at_evictions(tiny_model):
    for over_budget, end in (
        (True, "64 tokens"),
        (False, "64 tokens, each of which ends where an eviction is due"),
    ):
        with open_engine(tiny_model(), policies.fit("local", 96, 8), over_budget=over_budget) as engine:
            assert _prefill(engine) == f"stream: in batches of up to {end}"


def test_explain_shows_the_real_budget_if_kept_is_true(tiny_model):
    policy = policies.fit("buzz", 32, None, ["kept=true"])
    with open_engine(tiny_model(), policy, prefill="whole") as engine:
        line = _budget(engine)
        assert line.startswith(f"{policy.budget} cells per row = 4 sinks + 14 window + ")
        assert line.endswith("; at most 32 after an eviction")
        assert long_text(engine, "prompt", 32) is None
        # 40 tokens fit into the policy's real budget, but not into the requested budget of 32
        assert "It is read at once, in a cache of" in long_text(engine, "prompt", 40)
        assert policy.budget > 40
        engine.read(random_tokens(40))
        assert engine.n_kv == 4 + 14 + 5
        engine.reset()
        engine.read(random_tokens(300))
        assert engine.n_kv == 32


def test_notice_mentions_no_segments_if_there_can_be_none(tiny_model, capsys):
    policy = policies.fit("snapkv", 32, 8, ["heads=adaptive"])
    with open_engine(tiny_model(), policy, n_ctx=70) as engine:
        assert "It is read at once, in a cache" in long_text(engine, "prompt", 70)
        assert "It is read" not in long_text(engine, "prompt", 71)
    with open_engine(tiny_model(), policy, n_ctx=70, prefill="whole") as engine:
        sentence = (
            "the prompt has 71 tokens, more than rows that share a budget can read whole in a context of 70"
        )
        assert long_text(engine, "prompt", 71) == sentence
        explain_run(engine, "snapkv", "prompt", 71)
        assert "segment" not in capsys.readouterr().err
    with open_engine(tiny_model(), policies.fit("roco", 32, 8), n_ctx=70, prefill="whole") as engine:
        sentence = sentence.replace("rows that share a budget", "a policy that counts each token's queries")
        assert long_text(engine, "prompt", 71) == sentence


def test_notice_gives_the_mean_if_rows_share_a_budget(tiny_model):
    with open_engine(tiny_model(), policies.fit("h2o", 32, 8, ["heads=adaptive"])) as engine:
        assert engine.policy.budget == 64
        assert long_text(engine, "text", 32) is None
        sentence = "each KV head, in the mean, keeps at most 32 of them (80 %) and forgets the others"
        assert sentence in long_text(engine, "text", 40)
        engine.read(random_tokens(40))
        assert report.line(report.report(engine, "h2o")).startswith(
            f"{engine.mean_kv:.0f}/32 cells per row, "
        )
