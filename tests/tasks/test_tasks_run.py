"""Every task through `kvtool eval` with a small random model, and the calls that tasks make to a reader."""

from __future__ import annotations

import json
import re
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtool import policies, tasks
from kvtool.chats.template import Template
from kvtool.cli import app
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.loaded.model import Model
from kvtool.tasks.reader import Likelihood, Reader

DATA = Path(__file__).parents[1] / "data"

CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[reply]{% endif %}"
)

FILES = {
    "qa": ["lost_in_the_middle.jsonl", "hotpotqa.jsonl"],
    "summarize": ["xsum.jsonl", "qmsum.jsonl"],
    "choice": [f"{name}.jsonl" for name in ("openbookqa", "piqa", "winogrande", "mathqa", "copa", "rte")],
    "longbench": ["longbench.jsonl", "longbench_prompts.jsonl"],
    "stream": ["mt_bench_question.jsonl", "mt_bench_answer.jsonl"],
    "retrieval": ["kv_retrieval.jsonl"],
}

SCORES = {
    "qa": {"f1", "em", "subspan_em", "logp"},
    "summarize": {"rouge1", "rouge2", "rougeL"},
    "choice": {"acc", "acc_norm"},
    "longbench": {"score"},
    "stream": {"nll"},
    "retrieval": {"found", "logp"},
}

QUICK = dict.fromkeys(["qa", "summarize", "stream", "retrieval"], "n_max=8")


@pytest.fixture(scope="module")
def tiny_chat(tiny_model):
    return tiny_model(chat_template=CHAT, n_ctx_train=2048)


def evaluate(model, task, *arguments, files=None, code=0):
    """Run `kvtool eval` in this process, since starting Python takes longer than a task."""
    settings = ["--set", QUICK[task]] if task in QUICK else []
    paths = [str(DATA / file) for file in (FILES[task] if files is None else files)]
    done = CliRunner().invoke(
        app, ["eval", task, *paths, "-m", str(model), "-t", "1", *settings, *map(str, arguments)]
    )
    assert done.exit_code == code, (done.output, done.exception)
    return done


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", FILES)
def test_every_task_records_and_prints_its_scores(tiny_chat, tmp_path, task):
    out = tmp_path / "out.jsonl"
    done = evaluate(tiny_chat, task, "--budget", "64", "--policy", "h2o", "--records", out)
    results = records_of(out)
    kind = tasks.load(task)
    expected = kind().items([DATA / file for file in FILES[task]], None)
    assert [record["id"] for record in results] == [item.id for item in expected]
    scored = [record for record in results if record["scores"]]
    assert scored
    for record in scored:
        assert set(record["scores"]) == SCORES[task], record
        assert np.isfinite(list(record["scores"].values())).all()
        assert "error" not in record
        assert record["budget_cells"] == 64
    for name in SCORES[task]:
        mean = np.mean([record["scores"][name] for record in scored])
        assert f"{name} {mean:.3f}" in " ".join(done.stdout.split())
    # some tasks show their scores separately for each value of a field. Then the output names each value
    for name in kind.by:
        for value in {str(record[name]) for record in results}:
            assert f"\n{value} " in done.stdout
    # items with a record are not asked again
    resumed = evaluate(tiny_chat, task, "--budget", "64", "--policy", "h2o", "--records", out, "--resume")
    assert resumed.stdout == done.stdout
    assert len(records_of(out)) == len(results)


def test_answers_depend_on_temperature_and_seed(tiny_chat, tmp_path):
    def answers_of(*arguments, out=None):
        out = out or tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        evaluate(tiny_chat, "qa", "--policy", "full", "--limit", 2, "--records", out, "--resume", *arguments)
        return [record["output"] for record in records_of(out)]

    likeliest = answers_of()
    assert likeliest == answers_of("--temp", "0", "--seed", "4")
    sampled = answers_of("--temp", "0.9", "--seed", "4")
    assert sampled == answers_of("--seed", "4", "--temp", "0.9")
    other_answers = (answers_of("--temp", "0.9", "--seed", "5"), answers_of("--temp", "0.3", "--seed", "4"))
    assert sampled not in (likeliest, *other_answers)
    # if answers are sampled in another way, there is another record
    assert answers_of("--temp", "0.9", out=tmp_path / "0.jsonl") == likeliest + answers_of("--temp", "0.9")


def test_output_shows_temperature_and_seed_of_sampled_answers(tiny_chat):
    options = ("--policy", "full", "--limit", 1)
    output = evaluate(tiny_chat, "qa", *options, "--temp", "0.5", "--seed", "3").stdout
    assert output.split("\n")[0].endswith(", full, temperature 0.5, seed 3")
    assert evaluate(tiny_chat, "qa", *options).stdout.split("\n")[0].endswith(", full")


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("choice", ["--temp", "0.5"], "choice takes no --temp: it samples no answers"),
        ("stream", ["--temp", "2", "--set", "scored=true"], "stream takes no --temp: it samples no answers"),
        ("qa", ["--seed", "3"], "--seed has no effect without a temperature; add --temp T"),
    ],
)
def test_a_temperature_or_a_seed_without_effect_is_refused(task, more, message):
    # none.gguf does not exist, but this error comes first
    assert f"kvtool: {message}\n" in evaluate("none.gguf", task, *more, code=2).stderr


def test_intervals_are_computed_only_at_the_end(tiny_chat, monkeypatch):
    intervals = []

    def item_interval(scores, *, are_hits):
        intervals.append(1)
        return 0, 1

    monkeypatch.setattr("kvtool.measure.statistics.item_interval", item_interval)
    counts = []
    for limit in (1, 2):
        evaluate(tiny_chat, "choice", "--budget", "64", "--limit", limit, files=["rte.jsonl"])
        counts.append(len(intervals))
        intervals.clear()
    assert counts[0] == counts[1] > 0


def test_missing_package_is_reported_before_the_model_is_loaded(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    missing = lambda name, *rest: None if name == "rouge_score" else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    done = evaluate("no-such-model", "summarize", code=2)
    assert "summarize needs rouge_score, which is not installed: pip install '" in done.stderr
    assert done.stdout == ""


def test_items_are_asked_again_after_the_policy_file_changed(tiny_chat, tmp_path):
    out, policy = tmp_path / "out.jsonl", tmp_path / "mine.py"
    arguments = ("--budget", "64", "--policy", policy, "--records", out, "--limit", "1", "--resume")
    for n, comment in enumerate("aba", 1):
        policy.write_text(f"from kvtool.policies.local import POLICY  # {comment}\n")
        evaluate(tiny_chat, "choice", *arguments, files=["rte.jsonl"])
        # the policy file of the third run equals the file of the first run. Therefore the first run's record
        # is still valid
        assert len(records_of(out)) == min(n, 2)


def reader_for(model, budget=64, *, chat=False, policy="h2o"):
    fitted = policies.fit(policy, budget)
    full = policies.fit("full", 1024)
    template = Template(CHAT, "", "") if chat else None
    settings = Settings(n_batch=32, n_output=16, n_threads=1)
    return Reader(model, lambda n, n_answer: fitted, settings, template, None, lambda n, n_answer: full)


@pytest.fixture(scope="module")
def model(tiny_chat):
    with closing(Model(tiny_chat)) as model:
        yield model


PROMPT = "the heron stood by the mill and the mill stood by the river " * 3


def test_stop_strings_in_leading_white_space_are_ignored(model, monkeypatch):
    pieces = ["\n", " \n", "two", "\nlines"]
    monkeypatch.setattr("kvtool.chats.conversation.Writer.write", lambda self, n: iter(pieces))
    with closing(reader_for(model)) as reader:
        reader.read(PROMPT, 8)
        assert reader.write(8, stop=["\n"]) == "\n \ntwo"


def test_as_it_is_prompts_are_read_without_the_chat_template(model):
    with closing(reader_for(model, chat=True)) as reader:
        reader.read("abc", 8)
        assert reader.n_read == len(model.tokenize("[user]abc[end][reply]"))
        assert reader.engine.n_held == len(model.tokenize("[end][reply]"))
        reader.read("abc", 8, as_it_is=True)
        assert reader.n_read == len(model.tokenize("abc"))
        assert reader.engine.n_held == 0


@pytest.mark.parametrize("chat", [False, True])
def test_turns_follow_each_other_in_one_cache(model, chat):
    whole = {
        False: "USER: one\n\nASSISTANT: two\n\nUSER: three\n\nASSISTANT:",
        True: "[user]one[end][reply]two[end][user]three[end][reply]",
    }[chat]
    with closing(reader_for(model, 256, chat=chat)) as reader:
        reader.start()
        for turn in ("one", "three"):
            reader.read_turn(turn)
            after = reader.engine.context.logits()[-1].copy()
            reader.log_likelihood(reader.following("two"))
    with closing(Engine(model, policies.fit("full", 256), Settings(n_batch=32, n_threads=1))) as engine:
        engine.read(model.tokenize(whole))
        np.testing.assert_allclose(engine.context.logits()[-1], after, atol=2e-2)


class FakeReader:
    """A reader that returns given likelihoods of texts and given answers."""

    def __init__(self, logp, output=""):
        self.logp, self.output = logp, output
        self.texts = []

    engine = SimpleNamespace(n_past=0)

    def read(self, prompt, n_answer, as_it_is=False, uncut=False):
        self.texts, self.as_it_is, self.n_answer = [], as_it_is, n_answer

    def start(self):
        self.texts = []

    def read_turn(self, text):
        self.texts = [text]

    def write(self, n_max, stop=()):
        self.texts.append(self.output)
        self.stop = stop
        return self.output

    def following(self, text):
        return text

    def going_back(self):
        from contextlib import nullcontext

        def back():
            self.texts = []

        return nullcontext(back)

    def log_likelihood(self, text):
        logp = self.logp[tuple(self.texts), text]
        self.texts.append(text)
        return Likelihood(logp, len(text.split()))


def test_acc_uses_log_probability_and_acc_norm_divides_it_by_bytes():
    task = tasks.make("choice", [])
    right, *_ = task.items([DATA / "openbookqa.jsonl"], None)
    # "a pond" is the right answer. Its log-probability is -6, for 6 bytes. "a clock" has a lower
    # log-probability, -6.5, but it has 7 bytes. Therefore "a clock" has the higher log-probability per byte
    logp = {"a pond": -6.0, "a lamp": -9.0, "a clock": -6.5, "a drum": -8.0}
    answer = task.answer(right, FakeReader({((), text): value for text, value in logp.items()}))
    assert answer.output == "a pond"
    assert answer.scores == {"acc": 1, "acc_norm": 0}
    assert answer.about["logp"] == list(logp.values())


def test_winogrande_scores_the_text_after_the_blank():
    task = tasks.make("choice", [])
    item, _ = task.items([DATA / "winogrande.jsonl"], None)
    end = " was too small."
    reader = FakeReader({((), "pot"): -1.0, ((), "bag"): -9.0, (("pot",), end): -5.0, (("bag",), end): -4.0})
    answer = task.answer(item, reader)
    # there must be room for one token per byte of a choice and of the text after the blank
    assert reader.n_answer == len(f" pot{end}")
    assert answer.output == "bag"
    assert answer.scores == {"acc": 1, "acc_norm": 1}
    assert answer.about["logp"] == [-5, -4]


def test_qa_logp_is_that_of_the_likeliest_reference_per_token():
    task = tasks.make("qa", [])
    item, _ = task.items([DATA / "lost_in_the_middle.jsonl"], None)
    reader = FakeReader({((), "Ada Quill"): -4.0, ((), "A. Quill"): -6.0}, " It was Ada Quill.")
    answer = task.answer(item, reader)
    assert answer.output == "It was Ada Quill."
    assert answer.scores == {
        "f1": pytest.approx(2 * (2 / 4) * 1 / (2 / 4 + 1)),
        "em": 0,
        "subspan_em": 1,
        "logp": -2.0,
    }
    assert answer.about == {"logp": {"Ada Quill": -2.0, "A. Quill": -3.0}}
    assert reader.n_answer == 48
    tasks.make("qa", ["n_max=4"]).answer(item, reader)
    assert reader.n_answer == len(" Ada Quill")


def test_retrieval_reserves_room_for_quotes_and_a_leading_space():
    task = tasks.make("retrieval", ["n_max=1"])
    item, _ = task.items([DATA / "kv_retrieval.jsonl"], None)
    quoted = f'"{item.references[0]}"'
    reader = FakeReader({((), quoted): -3.0})
    assert task.answer(item, reader).scores == {"found": 0, "logp": -3}
    assert reader.n_answer == len(f" {quoted}")


def test_longbench_averages_are_means_over_categories():
    scores = {"qasper": [1.0, 0.0], "narrativeqa": [0.8], "trec": [1.0], "lcc": [0.3, 0.5], "vcsum": [0.1]}
    results = [{"dataset": name, "scores": {"score": score}} for name, of in scores.items() for score in of]
    task = tasks.make("longbench", [])
    english, chinese = (0.65 + 1.0 + 0.4) / 3, (0.1 + 0.4) / 2
    expected = {"average EN": english, "average ZH": chinese, "average all": (0.65 + 0.1 + 1.0 + 0.4) / 4}
    assert task.summary([*results, {"dataset": "lsht", "scores": {}}]) == pytest.approx(expected)
    assert list(task.summary(results[-3:-1])) == ["average all"]
    assert task.summary([]) == {}


def test_longbench_few_shot_prompts_are_raw_and_score_the_first_line():
    task = tasks.make("longbench", [])
    hotpotqa, trec = task.items([DATA / "longbench.jsonl"], None)
    reader = FakeReader({}, "\nDefinition\nDate")
    assert task.answer(trec, reader).scores == {"score": 1}
    assert reader.as_it_is
    # the first line names two classes
    assert task.answer(trec, FakeReader({}, "Definition, Date\n")).scores == {"score": 1 / 2}
    reader = FakeReader({}, "\nArden\nis it")
    assert task.answer(hotpotqa, reader).scores == {"score": pytest.approx(2 / 4)}
    assert not reader.as_it_is


def test_stream_nll_is_per_token():
    task = tasks.make("stream", ["scored=true"])
    turns = task.items([DATA / "mt_bench_question.jsonl", DATA / "mt_bench_answer.jsonl"], None)
    answer = task.answer(turns[0], FakeReader({(("What is 2 and 3?",), "It is 5."): -6.0}))
    assert answer.scores == {"nll": 2}
    assert answer.about == {"past": 0, "answer_tokens": 3}


def test_summarize_reads_articles_raw_by_default_and_meetings_as_turns():
    for file, plain, expected in (
        ("xsum.jsonl", "true", True),
        ("xsum.jsonl", "false", False),
        ("qmsum.jsonl", "true", False),
    ):
        task = tasks.make("summarize", [f"plain={plain}"])
        reader = FakeReader({}, " A roof.\n")
        answer = task.answer(task.items([DATA / file], None)[0], reader)
        assert reader.as_it_is is expected
        assert reader.stop == ["###"]
        assert answer.output == "A roof."


def test_likelihood_scores_the_right_summary_per_token_from_the_prompt():
    task = tasks.make("summarize", ["likelihood=true", "n_max=8"])
    item, *_ = task.items([DATA / "xsum.jsonl"], None)
    (right,) = item.references
    reader = FakeReader({((), right): -12.0}, " A roof.\n")
    answer = task.answer(item, reader)
    assert answer.scores["logp"] == -12 / len(right.split())
    assert answer.output == "A roof."
    assert reader.n_answer == len(f" {right}")
    answer = tasks.make("summarize", []).answer(item, FakeReader({}, " A roof.\n"))
    assert set(answer.scores) == {"rouge1", "rouge2", "rougeL"}


def test_unfinished_stream_starts_again_from_its_first_turn(tiny_chat, tmp_path):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    evaluate(tiny_chat, "stream", "--budget", "64", "--records", whole)
    evaluate(tiny_chat, "stream", "--budget", "64", "--records", broken, "--limit", "3")
    evaluate(tiny_chat, "stream", "--budget", "96", "--records", broken, "--resume")
    before = records_of(broken)
    evaluate(tiny_chat, "stream", "--budget", "64", "--records", broken, "--resume")
    after = records_of(broken)
    # all earlier records stay, and the newest record of an item counts
    assert after[: len(before)] == before
    strip = lambda record: {k: v for k, v in record.items() if k != "seconds"}  # noqa: E731
    assert [strip(r) for r in after[len(before) :]] == [strip(r) for r in records_of(whole)]


def test_budget_share_of_a_stream_is_of_the_trained_context(tiny_chat, tmp_path):
    out = tmp_path / "out.jsonl"
    evaluate(tiny_chat, "stream", "--policy", "h2o", "--budget", "20%", "--records", out, "--limit", "1")
    assert records_of(out)[0]["budget_cells"] == 409  # 20 % of 2,048 are 409.6


def test_budget_share_leaves_room_for_the_reply_header(tiny_chat, tmp_path):
    for policy in ("local", "buzz", "weightedkv", "recall"):
        out = tmp_path / f"{policy}.jsonl"
        evaluate(tiny_chat, "qa", "--policy", policy, "--budget", "5%", "--records", out)
        for record in records_of(out):
            # 5 % of the short text alone would be too few cells for the reply header
            assert len("[end][reply]") < record["budget_cells"] < 32


@pytest.mark.parametrize(
    ("policy", "more"),
    [("h2o", []), ("recall", []), ("recall", ["-b", "16"]), ("recall", ["-o", "chunk=64"])],
)
def test_byte_budget_includes_the_batch_and_the_cells_of_recall(tiny_chat, tmp_path, policy, more):
    out = tmp_path / "out.jsonl"
    # 256 KiB are 512 cells with f16 in two layers, with two heads of size 32. A batch, or the cells that
    # recall fills in a step, take some of them
    evaluate(tiny_chat, "qa", "--policy", policy, "--budget", "256KiB", "--records", out, *more)
    for record in records_of(out):
        assert record["kv_bytes"] <= 256 * 2**10
        assert 256 < record["budget_cells"] < 512


def test_a_budget_beyond_the_context_is_refused(tiny_chat):
    done = evaluate(tiny_chat, "qa", "--policy", "h2o", "--budget", "3000", code=2)
    assert "choose a budget of at most that, not 3000" in done.stderr


def test_passkey_prompt_beyond_the_context_is_not_cut(tiny_model, tmp_path):
    short, out = tiny_model(n_ctx_train=320), tmp_path / "out.jsonl"
    single = ("--set", "depths=0.5", "--set", "repeats=1", "--set", "lengths=600")
    small = ("--records", out, "--budget", "64", "--policy", "tova")
    done = evaluate(short, "passkey", *single, *small, files=[])
    assert done.stdout.startswith("passkey, 1 item, ")
    (record,) = records_of(out)
    n = record["prompt_tokens"]
    message = f"a prompt has {n} tokens, more than the trained context (320); it is not cut\n"
    assert done.stderr.count(message) == done.stderr.count("a prompt ") == 1
    assert not record["is_cut"]
    assert 500 < record["prompt_tokens"] <= 600
    long = ("--raw", "--max-prompt", "500", "--resume")
    evaluate(short, "qa", *small, *long, files=["lost_in_the_middle.jsonl"])
    _, first, *_ = records_of(out)
    assert not first["is_cut"]
    assert 320 < first["prompt_tokens"] <= 500
    done = evaluate(short, "passkey", "--policy", "full", *single, files=[], code=5)
    assert "1 of 1 item failed: the prompt (" in done.stderr


def test_cut_prompt_is_announced_before_it_is_read(tiny_chat, monkeypatch):
    steps = []

    @contextmanager
    def progress(label, n, n_done):
        yield lambda done, label: steps.append((done, label, len(written)))

    # lines that are printed next to the progress bar
    written = []
    monkeypatch.setattr("kvtool.cli.eval.command.tokens_progress", progress)
    monkeypatch.setattr("kvtool.cli.eval.command.say", lambda *lines: written.extend(filter(None, lines)))
    options = ("--max-prompt", 300, "-b", 64, "--policy", "tova", "--budget", 128, "--limit", 2)
    evaluate(tiny_chat, "qa", *options)
    before, after = written
    assert before == "a prompt does not fit in 300 tokens (--max-prompt): its middle is cut out"
    assert after == "1 of 2 prompts was too long; its middle was cut out"
    done, label, n_written = steps[0]
    assert (done, n_written) == (0, 1)
    assert re.fullmatch("qa, reading 0 of [23][0-9]{2} tokens", label)
    n_read = [int(match[1]) for _, label, _ in steps if (match := re.search(r"reading (\d+) of", label))]
    assert sum(64 <= n < 300 for n in n_read) >= 6


def test_turns_beyond_the_context_are_reported_and_not_scored(tiny_model, tmp_path):
    out = tmp_path / "out.jsonl"
    done = evaluate(
        tiny_model(chat_template=CHAT, n_ctx_train=128), "stream", "--policy", "full", "--records", out
    )
    last = records_of(out)[-1]
    assert last["scores"] == {}
    assert "128" in last["error"]
    assert "items failed" in done.stderr


def test_quarters_and_slope_use_only_scored_turns():
    task = tasks.make("stream", [])
    nll = [2.0, 2.5, 2.0, 3.0, 3.5, 3.0, 4.0, 4.0]
    past = [0, 100, 350, 400, 700, 900, 1000, 1600]
    results = [
        {"scores": {"nll": value}, "past": n, "n": i}
        for i, (value, n) in enumerate(zip(nll, past, strict=True))
    ]
    results.insert(3, {"scores": {}, "past": 380})
    summary = task.summary(results)
    assert [summary[f"nll, quarter {i}"] for i in (1, 2, 3, 4)] == [2.25, 2.5, 3.25, 4.0]
    (slope, _), covariance = np.polyfit(np.array(past) / 1000, nll, 1, cov=True)
    assert summary["nll, slope per 1,000 tokens"] == pytest.approx(slope)
    assert summary["nll, slope's standard error"] == pytest.approx(np.sqrt(covariance[0, 0]))
    assert task.summary([]) == {}
