"""Common parts of all tasks: reading under a policy, hiding facts, resuming from records, and the command."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections import Counter
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from kvtool import policies, tasks
from kvtool.chats.prompt import template_of
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import InputError, StreamEnd, UsageError
from kvtool.kernels.likelihood import token_nll
from kvtool.llama.loaded.model import Model
from kvtool.measure import perplexity, records, statistics
from kvtool.tasks import haystack
from kvtool.tasks import results as of_items
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Item, ScoredAnswer, Task, in_turn
from tests import fork_server
from tests.blocking_policy import TIMEOUT_S, BlockingPolicy
from tests.cli.in_process_command import run_kvtool
from tests.cli.test_cli import KVTOOL
from tests.tiny import CHATML

PROMPT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 4
ANSWER = " The fox looks back once more."


@contextmanager
def reading(path, policy="full", budget=None, n_prompt=None, chat=False, beyond=False, **settings):
    """Yield a reader with exact arithmetic. budget: number of cells, the same for every prompt."""
    exact = {"type_k": "f32", "type_v": "f32", "flash": "off", "n_threads": 1, "n_batch": 32, "n_output": 32}
    model = Model(path)

    def policy_for(n, n_answer):
        return policies.fit(policy, budget or n + n_answer)

    template = template_of(model) if chat else None
    reader = Reader(model, policy_for, Settings(**(exact | settings)), template, n_prompt, beyond)
    try:
        yield reader
    finally:
        reader.close()
        model.close()


def stepwise(model, policy, settings, prompt, answer):
    """Return the log-likelihood of an answer, computed token by token in a new engine."""
    engine = Engine(model, policy, settings)
    engine.read(model.tokenize(prompt, start=True))
    total = 0.0
    for token in model.tokenize(answer):
        nll = np.empty(1)
        token_nll(engine.context.logits()[-1:], np.array([token], np.int32), nll)
        total -= nll[0]
        engine.read(np.array([token], np.int32))
    engine.close()
    return total


def test_log_likelihood_under_full_equals_the_nll_of_the_stream(tiny_model):
    with reading(tiny_model()) as reader:
        reader.read(PROMPT, 40)
        likelihood = reader.log_likelihood(ANSWER)
        tokens = reader.model.tokenize(PROMPT + ANSWER, start=True)
        settings = Settings(
            type_k="f32", type_v="f32", flash="off", n_batch=32, n_output=32, over_budget=False
        )
        engine = Engine(reader.model, policies.fit("full", len(tokens)), settings)
        nll = perplexity.stream(engine, tokens)
        engine.close()
    assert likelihood.n > 20
    assert likelihood.logp == pytest.approx(-nll[-likelihood.n :].sum(), abs=1e-3)


@pytest.mark.parametrize("policy", ["h2o", "streamingllm", "snapkv", "weightedkv"])
def test_log_likelihood_equals_reading_the_answer_token_by_token(tiny_model, policy):
    with reading(tiny_model(), policy, 48) as reader:
        reader.read(PROMPT, 40)
        likelihood = reader.log_likelihood(ANSWER)
        assert reader.engine.n_evicted > 48
        expected = stepwise(reader.model, policies.fit(policy, 48), reader.settings, PROMPT, ANSWER)
    assert likelihood.logp == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("policy", ["full", "h2o", "bumblebee"])
def test_answers_after_going_back_equal_answers_to_a_fresh_prompt(tiny_model, policy):
    with reading(tiny_model(), policy, None if policy == "full" else 48) as reader:
        asks = [
            lambda: reader.log_likelihood(ANSWER),
            lambda: reader.log_likelihood(" No."),
            lambda: reader.write(24),
            lambda: reader.log_likelihood(ANSWER),
        ]
        apart = []
        for ask in asks:
            reader.read(PROMPT, 60)
            apart.append(ask())
        reader.read(PROMPT, 60)
        with reader.going_back() as back:
            together = []
            for ask in asks:
                back()
                together.append(ask())
    assert together == apart
    assert apart[0] == apart[-1] != apart[1]


def test_log_likelihoods_of_two_parts_add_up_to_the_whole(tiny_model):
    with reading(tiny_model(), "h2o", 64) as reader:
        reader.read(PROMPT, 60)
        parts = [reader.log_likelihood(ANSWER[:9]), reader.log_likelihood(ANSWER[9:])]
        reader.read(PROMPT, 60)
        whole = reader.log_likelihood(ANSWER)
    assert sum(part.logp for part in parts) == pytest.approx(whole.logp, abs=1e-3)


def test_written_text_is_likelier_than_another_text(smollm2):
    with reading(smollm2) as reader:
        reader.read("The sky is blue, the grass is green, and the sun is", 20)
        with reader.going_back() as back:
            tokens = reader.write(3)
            back()
            of_written = reader.log_likelihood(tokens)
            back()
            other = reader.log_likelihood(" a green sandwich")
    assert of_written.n == 3
    assert other.logp < of_written.logp


def test_stop_string_ends_the_written_text(tiny_model):
    with reading(tiny_model()) as reader:
        reader.read(PROMPT, 40)
        whole = reader.write(20)
        stop = whole[7:9]
        for stops in [(stop,), ("never said", stop)]:
            reader.read(PROMPT, 40)
            assert reader.write(20, stops) == whole[: whole.find(stop)]


def test_middle_of_a_long_prompt_is_cut_out(tiny_model):
    prompt = "".join(f"{i:04d}." for i in range(200))
    with reading(tiny_model(), n_prompt=103) as reader:
        reader.read(prompt, 20)
        assert reader.is_cut
        assert reader.n_read == 103
        tokens = reader._tokens(prompt, 20, None)
        assert b"".join(map(reader.model.piece, tokens.tolist())).decode() == prompt[:52] + prompt[-51:]
        reader.read(prompt[:103], 20)
        assert not reader.is_cut


def test_long_prompt_leaves_room_for_the_answer(tiny_model):
    with reading(tiny_model(n_ctx_train=128)) as reader:
        reader.read(PROMPT, 30)
        assert reader.n_read == 98
        reader.write(30)
        with pytest.raises(InputError, match="no room for a prompt"):
            reader.read(PROMPT, 128)


@pytest.mark.parametrize(
    ("n_prompt", "beyond", "n_read"),
    [(None, True, 98), (128, True, 98), (128, False, 98), (90, True, 90), (200, True, 200), (200, False, 98)],
)
def test_only_prompts_beyond_the_trained_context_depend_on_the_policy(tiny_model, n_prompt, beyond, n_read):
    path = tiny_model(n_ctx_train=128)
    with reading(path, "h2o", 64, n_prompt, beyond=beyond, positions="in-cache") as reader:
        reader.read(PROMPT, 30)
        assert reader.n_read == n_read


@pytest.mark.parametrize("text", ["cat", " cat", "'s hat"])
@pytest.mark.parametrize("shape", [{}, {"space_prefix": True}, {"space_prefix": True, "add_bos": True}])
def test_no_space_is_scored_that_the_answer_does_not_have(tiny_model, shape, text):
    with reading(tiny_model(**shape)) as reader:
        reader.read(PROMPT, 40)
        tokens = reader._after_text(text).tolist()
        assert b"".join(map(reader.model.piece, tokens)).decode() == text
        assert reader.log_likelihood(text).n == len(tokens)


def test_long_user_turn_is_cut_inside_the_chat_template(tiny_model):
    path = tiny_model(chat_template=CHATML)
    with reading(path, n_prompt=120, chat=True) as reader:
        reader.read("Hello there.", 20)
        tokens = reader._tokens("Hello there.", 20, reader.template)
        whole = "<|im_start|>user\nHello there.<|im_end|>\n<|im_start|>assistant\n"
        assert tokens.tolist() == reader.model.tokenize(whole, special=True, start=True).tolist()
        assert reader.engine.n_held == len(
            reader.model.tokenize("<|im_end|>\n<|im_start|>assistant\n", special=True)
        )
        reader.read("x" * 500, 20)
        assert reader.is_cut
        assert reader.n_read <= 120
        text = b"".join(
            reader.model.piece(t, special=True)
            for t in reader._tokens("x" * 500, 20, reader.template).tolist()
        )
        assert text.startswith(b"<|im_start|>user\nxxx")
        assert text.endswith(b"xxx<|im_end|>\n<|im_start|>assistant\n")


def test_engine_is_reused_while_the_budget_stays_the_same(tiny_model):
    model = Model(tiny_model())
    settings = Settings(n_threads=1, n_batch=32)
    reader = Reader(model, lambda n, n_answer: policies.fit("h2o", 64 if n < 100 else 128), settings)
    engines = []
    for prompt in (PROMPT[:50], PROMPT[:90], PROMPT, PROMPT[:50]):
        reader.read(prompt, 5)
        engines.append(reader.engine)
    reader.close()
    model.close()
    assert engines[0] is engines[1]
    assert [engine.policy.budget for engine in engines] == [64, 64, 128, 64]


SENTENCES = [f"Sentence {i} says {'much ' * (i % 5)}of nothing." for i in range(50)]


@pytest.mark.parametrize("length", [200, 700])
@pytest.mark.parametrize("depth", [0, 0.3, 0.5, 1])
def test_fact_is_hidden_at_its_depth_in_a_prompt_of_the_given_length(tiny_model, length, depth):
    model = Model(tiny_model())
    arguments = (model, SENTENCES, "The fact.", depth, length)
    prompt = haystack.hide(*arguments, random.Random(1), "START", "END")
    assert prompt == haystack.hide(*arguments, random.Random(1), "START", "END")
    assert prompt != haystack.hide(*arguments, random.Random(2), "START", "END")
    n = len(model.tokenize(prompt, start=True))
    model.close()
    longest = max(map(len, SENTENCES)) + 1
    assert length - longest <= n <= length
    start, text, end = prompt.split("\n")
    assert (start, end) == ("START", "END")
    before, fact, after = text.partition("The fact.")
    assert fact
    assert abs(len(before) - depth * (len(before) + len(after))) <= longest / 2 + 1
    # sentences are whole, and in the order of the text
    parts = haystack.sentences(before + after)
    index = SENTENCES.index(parts[0])
    assert parts == [SENTENCES[(index + i) % 50] for i in range(len(parts))]


@pytest.mark.parametrize(("n", "m"), [(1, 13), (2, 5), (2, 4), (3, 3), (6, 4)])
def test_first_items_are_spread_over_the_grid(n, m):
    cells = list(in_turn(range(n), range(m), 2))
    assert sorted(cells) == [(i, j, number) for i in range(n) for j in range(m) for number in range(2)]
    assert [number for *_, number in cells] == [0] * (n * m) + [1] * (n * m)
    for limit in range(1, len(cells)):
        for axis, size in enumerate((n, m)):
            counts = np.bincount([cell[axis] for cell in cells[:limit]], minlength=size)
            assert np.ptp(counts) <= 1


@pytest.mark.parametrize(("name", "more"), [("passkey", []), ("ruler", ["tasks=niah_multikey_3,fwe"])])
def test_first_two_items_have_different_lengths(tiny_model, name, more):
    task = tasks.make(name, ["lengths=2000,2500", *more])
    with closing(Model(tiny_model())) as model:
        assert [item.about["length"] for item in task.items([], model)[:2]] == [2000, 2500]


def test_length_too_short_for_the_fact_is_refused(tiny_model):
    model = Model(tiny_model())
    with pytest.raises(InputError, match="choose greater lengths"):
        haystack.hide(model, SENTENCES, "The fact.", 0.5, 15, random.Random(1), "START", "END")
    model.close()


def test_haystack_sentences_come_from_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("Second one. And\nmore! ")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "c.txt").write_text("Third? ")
    (tmp_path / "a.txt").write_text("First 3.5 times.")
    (tmp_path / "notes.md").write_text("No.")
    sentences = haystack.sentences_of([tmp_path])
    assert sentences == ["First 3.5 times.", "Second one.", "And more!", "Third?"]
    assert haystack.sentences_of([tmp_path / "notes.md"]) == ["No."]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no text"):
        haystack.sentences_of([tmp_path / "empty"])
    (tmp_path / "in" / "d.txt").write_bytes(b"a\xff")
    with pytest.raises(InputError, match=r"/in/d\.txt is not UTF-8 \(byte 1\)$"):
        haystack.sentences_of([tmp_path])


@dataclass(frozen=True, slots=True)
class Length(Task):
    """Task whose score is the length of the prompt. `n_requests` counts how often each item was asked."""

    n_requests: ClassVar[Counter] = Counter()
    by: ClassVar[tuple[str, ...]] = ("kind",)

    def items(self, files, model):
        return []

    def answer(self, item, reader):
        self.n_requests[item.id] += 1
        if item.prompt == "too long":
            raise StreamEnd("no more room")
        return ScoredAnswer(item.prompt, {"length": float(len(item.prompt)), "one": 1.0}, {"more": 1})


class Nothing:
    """A stand-in for a reader. It reads nothing, and its counters and sizes are constants."""

    n_read, is_cut = 3, False

    class engine:
        n_evicted, cache_bytes, archive_bytes, mean_kv = 0, 1, 0, 5.0

        class policy:
            budget = n_asked = 7


ITEMS = [Item(str(i), "x" * i, about={"kind": i % 2}) for i in range(1, 6)]
ABOUT = {"task": "length", "policy": "h2o"}


def measured(items, path=None, about=ABOUT, n=None):
    Length.n_requests.clear()
    results = of_items.TaskResults(about, items, path)
    steps = results.measure(Length(), Nothing())
    for _ in range(len(items) if n is None else n):
        next(steps, None)
    return results


def test_only_items_without_a_record_are_asked(tmp_path):
    path = tmp_path / "out.jsonl"
    measured(ITEMS, path, n=2)
    assert Length.n_requests == Counter(["1", "2"])
    results = measured(ITEMS, path)
    assert Length.n_requests == Counter(["3", "4", "5"])
    assert [record["id"] for record in results.records] == ["1", "2", "3", "4", "5"]
    assert results.records == records.read(path)
    measured(ITEMS, path)
    assert not Length.n_requests


@pytest.mark.parametrize(
    ("about", "item"),
    [
        (ABOUT | {"policy": "tova"}, ITEMS[0]),
        (ABOUT, Item("1", "another text")),
        (ABOUT, Item("1", "x", ["a reference"])),
        (ABOUT, Item("1", "x", choices=["a choice"])),
    ],
)
def test_changed_policy_or_item_is_asked_again(tmp_path, about, item):
    path = tmp_path / "out.jsonl"
    measured(ITEMS[:1], path)
    measured([item], path, about)
    assert Length.n_requests == Counter(["1"])
    assert len(records.read(path)) == 2


def test_item_that_does_not_fit_has_an_error_and_no_score():
    items = [ITEMS[0], Item("long", "too long"), ITEMS[1]]
    results = measured(items)
    assert results.records[1]["error"] == "no more room"
    assert of_items.means(results.records)["length"].mean == 1.5


def test_duplicate_items_are_refused():
    with pytest.raises(InputError, match="the same"):
        of_items.TaskResults(ABOUT, [ITEMS[0], ITEMS[0]])


def test_means_are_computed_per_score_and_per_group():
    results = measured(ITEMS)
    means = of_items.means(results.records)
    assert (means["length"].mean, means["length"].n) == (3, 5)
    assert means["length"].low < 3 < means["length"].high
    groups = of_items.broken_down(results.records, ["kind"])
    assert {kind: means["length"].mean for kind, means in groups.items()} == {(0,): 3, (1,): 3}
    assert [means["length"].n for means in groups.values()] == [2, 3]


def test_differences_to_the_first_evaluation_are_paired_by_item(tmp_path):
    path = tmp_path / "out.jsonl"
    about = ABOUT | {"task_params": {"depths": (0.1, 0.5)}, "model_sha256": "m", "type_k": "f16"}
    # another task, and another model, are no baselines
    measured(ITEMS, path, about | {"task": "other"})
    measured(ITEMS, path, about | {"model_sha256": "n"})
    assert measured(ITEMS[1:], path, about).differences() is None
    # the item that the first evaluation has not answered does not count
    results = measured(ITEMS, path, about | {"policy": "tova"})
    for i, record in enumerate(results.records):
        record["scores"] = {"length": record["scores"]["length"] + i}
    baseline, differences = results.differences()
    assert baseline == {"policy": "h2o", "options": None, "budget": None}
    assert set(differences) == {"length"}
    half = 3.1824 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert (differences["length"].mean, differences["length"].n) == (2.5, 4)
    assert (differences["length"].low, differences["length"].high) == pytest.approx(
        (2.5 - half, 2.5 + half), rel=1e-4
    )
    # fields in which the evaluations differ are named, also those that old records lack
    baseline, _ = measured(ITEMS, path, about | {"type_k": "q8_0", "policy_sha256": "p"}).differences()
    other_fields = {"type_k": "f16", "policy_sha256": None}
    assert baseline == {"policy": "h2o", "options": None, "budget": None, **other_fields}
    # the first evaluation is not compared, also if it is repeated later
    assert measured(ITEMS[1:], path, about).differences() is None


def test_interval_depends_on_the_kind_of_score():
    records = [{"scores": {"em": 1.0, "f1": 1.0}}] * 4
    means = of_items.means(records)
    assert (means["f1"].low, means["f1"].high) == (None, None)
    assert means["em"].low < 0.6
    assert of_items.means(records[:1])["em"].low is None


@pytest.mark.parametrize(
    ("task", "references", "text", "expected"),
    [
        ("passkey", ["12345"], " 12345. Remember it.", 1),
        ("passkey", ["12345"], "1234 5", 0),
        ("needle", ["sandwich", "Dolores Park"], "Eat a Sandwich in dolores park.", 1),
        ("needle", ["sandwich", "Dolores Park"], "Eat a sandwich in a park.", 0),
    ],
)
def test_found_is_1_if_the_answer_contains_all_references(task, references, text, expected):
    reader = SimpleNamespace(read=lambda prompt, n_answer, uncut: None, write=lambda n_max: text)
    answer = tasks.make(task, []).answer(Item("1", "", references), reader)
    assert answer.output == text
    assert answer.scores == {"found": expected}


def test_every_task_has_a_docstring_and_a_source():
    assert {"needle", "passkey"} <= set(tasks.names())
    for name in tasks.names():
        kind = tasks.load(name)
        assert issubclass(kind, Task)
        assert __import__(kind.__module__, fromlist=["x"]).__doc__.startswith(f"{name}: ")
        assert kind.source


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        ("depths=2", "depths must be in 0..1"),
        ("lengths=0", "lengths must be numbers of tokens"),
        ("lengths=1k", "lengths must be a whole number"),
        ("repeats=0", "at least 1"),
        ("digits=0", "1..12"),
        ("size=3", "lengths, depths, repeats"),
        ("size", "name=value"),
    ],
)
def test_invalid_parameters_raise_usage_error(parameter, words):
    with pytest.raises(UsageError, match=words):
        tasks.make("passkey", [parameter])


SMALL = ("--set", "lengths=400", "--set", "depths=0.2,0.8", "--set", "repeats=2", "-t", "1")


@pytest.mark.parametrize("command", ["eval", "perplexity"])
def test_eval_and_perplexity_default_to_recall_or_else_h2o(command, tiny_model, tmp_path):
    def policy(*options):
        done = run_kvtool(command, *of[command], "-m", tiny_model(), "-t", "1", "--json", *options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[0])["policy"], done.stderr

    text = tmp_path / "text"
    text.write_text("word " * 100)
    of = {"eval": ("passkey", *SMALL, "--limit", "1"), "perplexity": (text, "--budget", "64")}
    assert policy()[0] == "recall"
    name, stderr = policy("--positions", "in-cache")
    assert name == "h2o"
    assert "recall does not work with --positions in-cache; the policy is h2o" in stderr
    done = run_kvtool(
        command, *of[command], "-m", tiny_model(), "--policy", "recall", "--positions", "in-cache"
    )
    assert "choose --positions auto or original" in done.stderr


def test_budget_share_applies_to_each_prompt_and_is_rounded_down(tiny_model, tmp_path):
    out = tmp_path / "out.jsonl"
    done = run_kvtool(
        "eval", "passkey", "-m", tiny_model(), *SMALL, "--policy", "h2o", "--budget", "25%", "--records", out
    )
    assert done.returncode == 0, done.stderr
    assert "found by depth and length" in done.stdout
    results = records.read(out)
    assert len(results) == 4
    # a quarter of this prompt's length ends in .75, so rounding to the nearest number would give another
    # result
    assert any(record["prompt_tokens"] % 4 == 3 for record in results)
    for record in results:
        assert record["budget_cells"] == record["prompt_tokens"] // 4
        assert record["evicted"] > 200
        assert record["scores"] == {"found": float(record["references"][0] in record["output"])}


def test_too_small_share_gives_the_smallest_budget_of_the_policy(tiny_model):
    done = run_kvtool(
        "eval", "passkey", "-m", tiny_model(), *SMALL, "--policy", "buzz", "--budget", "1%", "--json"
    )
    assert done.returncode == 0, done.stderr
    *results, summary = map(json.loads, done.stdout.splitlines())
    assert {record["budget_cells"] for record in results} == {policies.spec("buzz").smallest_budget()}
    assert summary["items"] == 4
    assert summary["summary"]["found"]["n"] == 4


def test_resume_completes_an_unfinished_run(tiny_model, tmp_path):
    out = tmp_path / "out.jsonl"
    command = ("eval", "passkey", "-m", tiny_model(), *SMALL, "--policy", "full", "--records", out)
    assert run_kvtool(*command, "--limit", 1).returncode == 0
    done = run_kvtool(*command)
    assert done.returncode == 2
    assert "continue it with --resume" in done.stderr
    first = out.read_bytes()
    assert run_kvtool(*command, "--resume").returncode == 0
    assert out.read_bytes().startswith(first)
    ids = ["400-0.2-0", "400-0.8-0", "400-0.2-1", "400-0.8-1"]
    assert [record["id"] for record in records.read(out)] == ids
    done, repeated = (run_kvtool(*command, "--resume") for _ in range(2))
    assert done.stdout == repeated.stdout
    assert "passkey, 4 items" in done.stdout


def test_second_policy_of_a_file_is_compared_with_the_first(tiny_model, tmp_path):
    command = ("eval", "passkey", "-m", tiny_model(), *SMALL, "--records", tmp_path / "out.jsonl", "--resume")
    expected = run_kvtool(*command, "--policy", "full").stdout
    assert "minus" not in expected
    second = (*command, "--policy", "h2o", "--budget", "25%")
    title = "minus full (first in the file), over the same items:\n\nscore"
    assert title in run_kvtool(*second).stdout
    summary = json.loads(run_kvtool(*second, "--json").stdout.splitlines()[-1])
    assert summary["first"] == {"policy": "full", "options": [], "budget": None}
    difference = summary["minus_first"]["found"]
    assert difference["n"] == 4
    assert difference["low"] < difference["mean"] < difference["high"]
    assert run_kvtool(*command, "--policy", "full").stdout == expected
    other_type = run_kvtool(*command, "--policy", "full", "-ctk", "q8_0", "-ctv", "q8_0")
    assert "minus full, type_k f16, type_v f16 (first in the file)" in other_type.stdout
    # `full` has no `evict_every`, so only the default of --batch-size is named
    each = run_kvtool(*second, "--evict-every", "1", "--batch-size", "32")
    assert "minus full, n_batch default (first in the file)" in each.stdout


def test_the_default_of_an_evicting_baseline_is_named(tiny_model, tmp_path):
    command = ("eval", "passkey", "-m", tiny_model(), *SMALL, "--records", tmp_path / "out.jsonl", "--resume")
    assert run_kvtool(*command, "--policy", "h2o").returncode == 0
    done = run_kvtool(*command, "--policy", "recall", "--evict-every", "1")
    assert "minus h2o, budget 20%, evict_every default (first in the file)" in done.stdout


@pytest.mark.parametrize(
    ("name", "values", "low", "high"),
    [
        ("rouge1", [0.1, 0.1, 0.9], 0, 1),
        ("logp", [-9.0, -0.1, -0.1], None, 0),
        ("nll", [0.1, 0.1, 9], 0, None),
    ],
)
def test_intervals_are_within_the_range_of_a_score(name, values, low, high):
    mean = of_items.means([{"scores": {name: value}} for value in values])[name]
    plain = statistics.item_interval(np.array(values), are_hits=False)
    assert plain[0] < -0.5
    assert plain[1] > 0.5
    assert (mean.low, mean.high) == (plain[0] if low is None else low, plain[1] if high is None else high)


def test_intervals_of_differences_are_within_the_range_of_differences(tmp_path):
    path, all_differences = tmp_path / "out.jsonl", []
    for policy, values in (("full", [0, 0, 1]), ("h2o", [1, 0.9, 0])):
        about = dict.fromkeys(("task", "task_params", "chat", "max_prompt", "temp", "seed", "model_sha256"))
        about |= {"policy": policy, "options": [], "budget": None}
        results = of_items.TaskResults(about, [Item(str(i), "x") for i in range(3)], path)
        answers = iter([ScoredAnswer("", {"f1": value, "logp": -value}) for value in values])
        task = SimpleNamespace(answer=lambda item, reader, answers=answers: next(answers))
        engine = dict.fromkeys(("mean_kv", "n_evicted", "cache_bytes", "archive_bytes"), 0)
        engine["policy"] = SimpleNamespace(n_asked=1, budget=1)
        reader = SimpleNamespace(n_read=1, is_cut=False, engine=SimpleNamespace(**engine))
        assert len(list(results.measure(task, reader))) == 3
        all_differences.append(results.differences())
    assert all_differences[0] is None
    differences = all_differences[1][1]
    assert (differences["f1"].low, differences["f1"].high) == (-1, 1)
    # a difference of log-probabilities has no limits
    assert differences["logp"].low < -1
    assert differences["logp"].high > 1


def test_items_of_which_different_parts_were_read_are_not_compared(tmp_path):
    path, found = tmp_path / "out.jsonl", []
    for policy, n_read in (("full", (98, 40)), ("h2o", (200, 40))):
        about = dict.fromkeys(("task", "task_params", "chat", "max_prompt", "temp", "seed", "model_sha256"))
        about |= {"policy": policy, "options": [], "budget": None}
        results = of_items.TaskResults(about, [Item(str(i), "x") for i in range(2)], path)
        engine = dict.fromkeys(("mean_kv", "n_evicted", "cache_bytes", "archive_bytes"), 0)
        engine["policy"] = SimpleNamespace(n_asked=1, budget=1)
        reader = SimpleNamespace(n_read=0, is_cut=False, engine=SimpleNamespace(**engine))

        def answer(item, reader, n_read=n_read):
            reader.n_read = n_read[int(item.id)]
            return ScoredAnswer("", {"f1": item.id == "1"})

        assert len(list(results.measure(SimpleNamespace(answer=answer), reader))) == 2
        found.append(results.differences())
    assert found[1][1]["f1"].n == 1


def test_needle_uses_the_chat_template(tiny_model, tmp_path):
    (tmp_path / "hay.txt").write_text(" ".join(SENTENCES))
    options = ("-m", tiny_model(chat_template=CHATML), *SMALL, "--set", "lengths=600,700", "--policy", "tova")
    done = run_kvtool("eval", "needle", tmp_path / "hay.txt", *options, "--json")
    assert done.returncode == 0, done.stderr
    *results, summary = map(json.loads, done.stdout.splitlines())
    assert {record["length"] for record in results} == {600, 700}
    assert summary["chat"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_reports_how_many_items_are_recorded(tiny_model, tmp_path, number):
    out = tmp_path / "out.jsonl"
    # the policy waits as soon as the first item has a record, so it waits while the second item is read
    blocking = BlockingPolicy(tmp_path, f"Path({str(out)!r}).exists() and Path({str(out)!r}).stat().st_size")
    options = ("--policy", blocking.policy, "--budget", 64)
    command = ["eval", "passkey", "-m", tiny_model(), *SMALL, *options, "--records", out]
    with fork_server.Popen(
        [*KVTOOL, *map(str, command)], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        blocking.wait()
        process.send_signal(number)
        stderr = process.stderr.read()
        assert process.wait(TIMEOUT_S) == 128 + number
    assert len(records.read(out)) == 1
    assert stderr == f"kvtool: stopped; 1 of 4 items are in {out}; --resume does the rest\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_full_disk_does_not_lose_the_finished_answers(tiny_model, tmp_path, monkeypatch, as_json):
    out, append = tmp_path / "out.jsonl", records.append

    def full(path, record):
        if path.exists():
            raise records.NotStored(f"cannot write {path}: No space left on device")
        append(path, record)

    monkeypatch.setattr(records, "append", full)
    command = ["passkey", "-m", tiny_model(), *SMALL, "--records", out, *["--json"] * as_json]
    done = run_kvtool("eval", *command)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"kvtool: cannot write {out}: No space left on device"
    assert len(records.read(out)) == 1
    if as_json:
        *answers, summary = map(json.loads, done.stdout.splitlines())
        assert len(answers) == summary["items"] == 2
    else:
        assert re.search("^found ", done.stdout, re.M)


@pytest.mark.skipif(os.name != "posix", reason="terminals of Unix")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_records_go_to_stdout_and_an_interrupt_ends_the_progress_bar(tiny_model, tmp_path, is_stopped):
    blocking = BlockingPolicy(tmp_path)
    options = ("--policy", blocking.policy, "--budget", 64) if is_stopped else ()
    command = ["eval", "passkey", "-m", tiny_model(), *SMALL, *options, "--json"]
    master, slave = os.openpty()
    stderr, is_interrupted = b"", False
    with (tmp_path / "out").open("w") as out:
        process = fork_server.Popen(
            [*KVTOOL, *map(str, command)], stdout=out, stderr=slave, env=os.environ | {"TERM": "xterm"}
        )
        os.close(slave)
        # reading from the terminal raises OSError after the process has ended
        with suppress(OSError):
            while new := os.read(master, 65536):
                stderr += new
                if is_stopped and not is_interrupted and b"0/4" in stderr:
                    blocking.wait()
                    process.send_signal(signal.SIGINT)
                    is_interrupted = True
    stderr = stderr.decode()
    assert process.wait(TIMEOUT_S) == (130 if is_stopped else 0)
    os.close(master)
    assert "passkey" in stderr
    if is_stopped:
        # the cursor is shown again, and no text follows the line
        end = "\x1b[?25h\r\nkvtool: stopped"
        assert stderr.rstrip().endswith(end)
    else:
        assert len(list(map(json.loads, (tmp_path / "out").read_text().splitlines()))) == 5
        assert '"task"' not in stderr


def test_eval_without_arguments_lists_the_tasks():
    done = run_kvtool("eval")
    assert done.returncode == 0
    assert all(name in done.stdout for name in tasks.names())
    listed = json.loads(run_kvtool("eval", "--json").stdout)
    assert [each["name"] for each in listed] == tasks.names()
    assert listed[0]["params"].keys() >= {"shots"}
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    for task in listed:
        assert set(task["explained"]) == set(task["params"]), task["name"]
        for name, text in task["explained"].items():
            assert text.endswith("."), (task["name"], name)
            assert any(line[0] == name and line[1].startswith(text) for line in lines), (task["name"], name)
    assert ["digits", "Number of digits of the key. [default: 5]"] in lines


@pytest.mark.parametrize(("policy", "expected"), [(("full",), 1), (("local", "--budget", "64"), 0)])
def test_real_model_finds_the_passkey_only_if_it_is_held(smollm2, share_of, policy, expected):
    lengths = f"lengths={share_of(160, 512)}"
    done = run_kvtool(
        *("eval", "passkey", "-m", smollm2, "--policy", *policy, "--set", lengths, "-t", "1"),
        *("--set", "depths=0.3", "--set", "repeats=1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["summary"]["found"]["mean"] == expected
