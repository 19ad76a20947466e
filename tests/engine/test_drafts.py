"""Draft tokens: lookups, draft lengths, and texts that do not depend on drafts."""

from __future__ import annotations

import json
import re
from contextlib import closing

import numpy as np
import pytest

from kvtool import policies
from kvtool.chats.logprobs import logprobs
from kvtool.chats.writer import Writer
from kvtool.config.drafting import max_draft_tokens
from kvtool.config.run import WriteOptions
from kvtool.drafts.draft_length import DraftLength
from kvtool.drafts.drafter import Drafter
from kvtool.drafts.lookup import Lookup
from kvtool.drafts.model import ModelDraft, check_draft
from kvtool.engine.settings import MAX_DRAFT
from kvtool.errors import UsageError
from kvtool.kernels.ngrams import N_KEY
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.llama.sampling import Sampling
from kvtool.models.layers import Kind, Layer, Layers
from tests import tiny
from tests.cli.in_process_command import run_kvtool
from tests.engine.exact_engines import open_engine


def best_place(tokens):
    """Find the longest earlier copy of the last tokens, and return (place, n).

    The n tokens before `place` equal the last n tokens, and n is as large as possible. If several places have
    the largest n, return the newest place.
    """
    n, best = len(tokens), (0, 0)
    for place in range(n - 1, N_KEY - 1, -1):
        same = 0
        while same < min(place, 64) and tokens[place - 1 - same] == tokens[n - 1 - same]:
            same += 1
        if same >= N_KEY and same > best[1]:
            best = place, same
    return best


def test_lookup_finds_the_longest_earlier_copy():
    rng = np.random.default_rng(0)
    lookup, tokens, n_found = Lookup(), [], 0
    for _ in range(300):
        if tokens and rng.random() < 0.2:
            keep = int(rng.integers(max(len(tokens) - 40, 0), len(tokens) + 1))
            lookup.cut(keep)
            del tokens[keep:]
        new = rng.integers(0, 3, int(rng.integers(0, 9))).astype(np.int32)
        lookup.add(new)
        tokens += new.tolist()
        assert lookup.n == len(tokens)
        place, same = best_place(tokens)
        assert lookup.look() == same
        if same:
            n_found += 1
            period = tokens[place:]
            assert lookup.guess(9).tolist() == [period[i % len(period)] for i in range(9)]
    assert n_found > 100


def test_a_lookup_grows_with_its_stream():
    lookup, phrase = Lookup(), np.arange(5000, dtype=np.int32)
    lookup.add(phrase)
    assert lookup.look() == 0
    lookup.add(phrase[:40])
    assert lookup.look() == 40
    assert lookup.guess(3).tolist() == [40, 41, 42]


def timed(slope):
    """Return a DraftLength with measured times.

    A step of one token takes 0.01 s. Each further token adds `slope` * 0.01 s.
    """
    length = DraftLength()
    for n in range(1, MAX_DRAFT + 2):
        for _ in range(3):
            length.took(n, 0.01 * (1 + slope * (n - 1)))
    return length


@pytest.mark.parametrize(
    ("share", "slope", "least", "most"), [(1, 0.1, MAX_DRAFT, MAX_DRAFT), (0, 0.1, 0, 0), (0.7, 0.2, 1, 5)]
)
def test_draft_length_depends_on_acceptance_and_cost(share, slope, least, most):
    pace, rng = timed(slope), np.random.default_rng(0)
    for _ in range(200):
        n_true = 0
        while n_true < MAX_DRAFT and rng.random() < share:
            n_true += 1
        pace.judge(3, n_true, MAX_DRAFT)
    lengths = [pace.choose(3, MAX_DRAFT) for _ in range(20)]
    assert least <= min(lengths) <= max(lengths) <= most
    assert pace.choose(3, 0) == 0


def test_unprofitable_drafts_are_retried_occasionally():
    pace = timed(0.5)
    for _ in range(100):
        pace.judge(20, 0, 4)
    lengths = [pace.choose(20, MAX_DRAFT) for _ in range(200)]
    assert 2 <= sum(n > 0 for n in lengths) <= 8


def test_draft_length_depends_on_the_support():
    pace = timed(0.15)
    for _ in range(100):
        pace.judge(3, 0, 4)
        pace.judge(30, 8, 8)
    assert pace.choose(30, MAX_DRAFT) > 8
    assert pace.choose(3, MAX_DRAFT) == 0


def test_support_grows_with_each_draft_token():
    pace = timed(0.15)
    for _ in range(100):
        pace.judge(3, 1, 8)
    # in each step, a token with support 3 was accepted, and then a token with support 4 was rejected.
    # Therefore only tokens with support 3 are still drafted
    assert pace.choose(3, MAX_DRAFT) == 1
    assert pace.choose(4, MAX_DRAFT) == 0


class ConstantSource:
    """Source that always drafts the same token."""

    n = 0

    def __init__(self, token, support=3):
        self.token, self.support = token, support

    def cut(self, n):
        self.n = min(n, self.n)

    def add(self, tokens):
        self.n += len(tokens)

    def look(self):
        return self.support

    def guess(self, n):
        return np.full(n, self.token, np.int32)


def test_draft_model_is_used_if_the_lookup_finds_nothing():
    lookup, model = ConstantSource(1), ConstantSource(2)
    drafter = Drafter(lookup, model)
    drafter.add(np.arange(5))
    drafter.cut(4)
    assert drafter.n == lookup.n == model.n == 4
    assert set(drafter.guess(6).tolist()) == {1}
    drafter.judge(0)
    lookup.support = 0
    assert drafter.guess(6).tolist() == [2] * 6
    drafter.judge(5)
    assert len(drafter.guess(0)) == 0
    assert drafter.n_accepted == 5
    # drafts of the lookup with support 3 were always rejected, so the draft model is used. Its accepted
    # tokens must not count as accepted tokens of the lookup
    lookup.support = 3
    for _ in range(50):
        drafter._pace.judge(3, 0, 4)
    for _ in range(20):
        assert drafter.guess(6).tolist() == [2] * 6
        drafter.judge(6)


@pytest.mark.parametrize(("p", "n"), [(1.0, 9), (0.8, 4), (0.6, 2), (0.3, 1), (0.2, 0)])
def test_draft_model_stops_when_acceptance_becomes_unlikely(talker, monkeypatch, p, n):
    monkeypatch.setattr("kvtool.drafts.model._likeliest", lambda logits: (7, p))
    with closing(Model(talker)) as model, closing(ModelDraft(model, 1, model.n_vocab)) as source:
        source.add(np.arange(3, 40, dtype=np.int32))
        assert len(source.guess(9)) == n


RIVER_TEXT = "the river is long and the river is slow and the river is long and the river is"
SETTINGS = {
    "greedy": {},
    "drawn": {"temp": 1.0},
    "cut": {"temp": 0.8, "top_k": 5, "min_p": 0.1},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.5, "repeat_last_n": 32},
    "bias": {"logit_bias": ((40, 3.0),)},
    "mirostat": {"mirostat": 2, "temp": 1.0},
    "grammar": {"grammar": 'root ::= ("river" | "slow" | " ")+'},
    "schema": {"temp": 1.0, "json_schema": json.dumps({"type": "array", "items": {"const": "a river"}})},
}


def generate_with(path, drafter, settings, n=120, policy="recall"):
    """Return (text, stream, log-probabilities, contents of the rows) of a writer."""
    likely = []
    # with search=all, a step attends exactly to all tokens, so rounding cannot change which clusters are
    # chosen
    fitted = policies.fit(policy, 64, 16, ["search=all"] if policy == "recall" else [])
    with open_engine(path, fitted, n_draft=MAX_DRAFT, n_output=1, archive_type="f32") as engine:
        sampler = Sampler(engine.model, Sampling(**settings), seed=3)
        with closing(sampler):
            writer = Writer(engine, sampler, drafter)
            writer.after_sampling = lambda token: likely.append(
                logprobs(engine.model, engine.context.next_logits, token, 0)["logprob"]
            )
            writer.read(engine.model.tokenize(RIVER_TEXT))
            text = "".join(writer.write(n))
            assert engine.n_past == len(writer.tokens)
            return text, writer.tokens.tolist(), likely, engine.cells().pos.tolist()


@pytest.mark.parametrize("policy", ["recall", "h2o"])
@pytest.mark.parametrize("its", SETTINGS.values(), ids=SETTINGS)
def test_written_text_does_not_depend_on_draft_tokens(talker, its, policy):
    drafter = Drafter(Lookup())
    without, with_guesses = (generate_with(talker, each, its, policy=policy) for each in (None, drafter))
    assert without[:2] == with_guesses[:2]
    assert np.abs(np.subtract(without[2], with_guesses[2])).max() < 1e-3
    assert without[3] == with_guesses[3]
    assert drafter.n_drafted >= drafter.n_accepted
    # sampled or penalized text may have no repetitions; then lookups find no drafts
    assert drafter.n_drafted > 0 or its.keys() & {"temp", "repeat_penalty"}


def test_text_that_a_schema_forces_is_drafted(talker):
    document = {"a name that is long": "and a text that is longer"}
    schema = {
        "type": "object",
        "properties": {"a name that is long": {"const": document["a name that is long"]}},
    }
    options = {"json_schema": json.dumps(schema | {"required": [*document]})}
    drafter = Drafter(Lookup())
    without, with_guesses = (generate_with(talker, each, options) for each in (None, drafter))
    assert json.loads(with_guesses[0]) == document
    assert without[:2] == with_guesses[:2]
    model = Model(talker, vocab_only=True)
    n_forced = sum(len(model.tokenize(text)) for pair in document.items() for text in pair)
    model.close()
    assert drafter.n_accepted >= n_forced - 2


def test_closed_text_continues_after_the_pieces_it_yielded(talker):
    for n_piece in (1, 7, 30):
        with open_engine(talker, policies.fit("h2o", 64, 16), n_draft=MAX_DRAFT, n_output=1) as engine:
            writer = Writer(engine, Sampler(engine.model), Drafter(Lookup()))
            writer.read(engine.model.tokenize(RIVER_TEXT))
            pieces = writer.write(100)
            first = [next(pieces) for _ in range(n_piece)]
            pieces.close()
            assert engine.n_past == len(writer.tokens)
            # draft tokens after the last piece are dropped, and the next text continues after this piece
            more = "".join(writer.write(20))
            whole = generate_with(talker, None, {}, n_piece + 20, "h2o")[0]
            assert "".join(first) + more == whole


def test_reset_and_postpone_empty_the_drafter(talker):
    with open_engine(talker, policies.fit("full", 400), n_draft=MAX_DRAFT, n_output=1) as engine:
        writer = Writer(engine, Sampler(engine.model), Drafter(Lookup()))
        for reset in (writer.reset, lambda: writer.postpone(np.arange(3, 9, dtype=np.int32))):
            writer.read(engine.model.tokenize(RIVER_TEXT))
            "".join(writer.write(20))
            assert writer.drafter.n > 20
            reset()
            assert writer.drafter.n == 0


def test_stop_string_ends_a_text_within_draft_tokens(talker):
    whole = generate_with(talker, None, {}, 60)[0]
    stop = whole[30:34]
    results = [generate_with(talker, each, {"stop": (stop,)}) for each in (None, Drafter(Lookup()))]
    assert results[0][0] == results[1][0] == whole[: whole.index(stop)]
    assert results[0][1] == results[1][1]


def test_draft_model_equal_to_the_main_model_is_mostly_accepted(talker, however_unlikely):
    without = generate_with(talker, None, {}, 100)
    with closing(Model(talker)) as model, closing(ModelDraft(model, 1, model.n_vocab)) as source:
        drafter = Drafter(ConstantSource(0, support=0), source)
        assert generate_with(talker, drafter, {}, 100)[:2] == without[:2]
        assert drafter.n_accepted > 0.8 * drafter.n_drafted > 40
        # the source forgets all but 10 tokens, reads other tokens, and drafts again
        source.cut(10)
        source.add(np.arange(3, 700, dtype=np.int32) % 250 + 3)
        assert len(source.guess(4)) == 4


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("arch", ["lfm2", "qwen35", "llama"])
def test_draft_model_forgets_rejected_draft_tokens(tiny_model, however_unlikely, monkeypatch, arch, has_room):
    rng, n_accepted = np.random.default_rng(0), 0
    with (
        closing(Model(tiny_model(arch=arch))) as model,
        closing(ModelDraft(model, 1, model.n_vocab)) as source,
    ):
        if not has_room:
            source._engine.checkpoints.max_bytes = 0
        stream = rng.integers(3, 250, 20).astype(np.int32)
        source.add(stream)
        # in each turn, a new source must draft the same tokens; the stream is too short for evictions
        for turn in range(30):
            guess = source.guess(5)
            with closing(ModelDraft(model, 1, model.n_vocab)) as fresh:
                fresh.add(stream)
                assert guess.tolist() == fresh.guess(5).tolist()
            # accept 0 to 5 of the draft tokens
            n = turn % 6
            n_accepted += n
            more = np.concatenate([guess[:n], rng.integers(3, 250, 1)]).astype(np.int32)
            source.add(more)
            stream = np.concatenate([stream, more])
        assert len(stream) < 256
        assert n_accepted == 75


@pytest.mark.parametrize("arch", ["lfm2", "qwen35"])
def test_draft_model_with_recurrent_layers_does_not_change_the_text(tiny_model, however_unlikely, arch):
    path = tiny_model(arch=arch)
    without = generate_with(path, None, {}, 400)
    with closing(Model(path)) as model, closing(ModelDraft(model, 1, model.n_vocab)) as source:
        drafter = Drafter(ConstantSource(0, support=0), source)
        assert generate_with(path, drafter, {}, 400)[:2] == without[:2]
        assert drafter.n_drafted >= drafter.n_accepted > 40
        assert len(source._engine.checkpoints) == 1


def test_draft_model_with_another_vocabulary_is_refused(talker, tiny_model, tmp_path):
    other_tokens = tmp_path / "other.gguf"
    tiny.write_llama(other_tokens, control=[f"<{i}>" for i in range(40)])
    for path in (tiny_model(n_vocab=449), other_tokens):
        with (
            closing(Model(talker, vocab_only=True)) as model,
            closing(Model(path, vocab_only=True)) as other,
            pytest.raises(UsageError, match="another vocabulary"),
        ):
            check_draft(model, other)


@pytest.mark.parametrize("n_vocab", [300, 448])
def test_draft_model_may_have_another_padding_of_the_vocabulary(
    talker, tiny_model, monkeypatch, however_unlikely, n_vocab
):
    # the talker has 320 tokens
    with closing(Model(talker)) as model, closing(Model(tiny_model(n_vocab=n_vocab))) as draft:
        check_draft(model, draft)
        with closing(ModelDraft(draft, 1, model.n_vocab)) as source:
            read, plain = [], source._engine.step
            monkeypatch.setattr(source._engine, "step", lambda tokens: read.extend(tokens) or plain(tokens))
            without = generate_with(talker, None, {}, 60)
            assert (
                generate_with(talker, Drafter(ConstantSource(0, support=0), source), {}, 60)[:2]
                == without[:2]
            )
            assert read
            source.cut(0)
            source.add(np.arange(3, 40, dtype=np.int32))
            assert len(source.guess(4)) > 0
            # no token is proposed that the larger model lacks
            for likely, n in ((319, 4), (320, 0)):
                monkeypatch.setattr("kvtool.drafts.model._likeliest", lambda logits, its=likely: (its, 1.0))
                if likely < n_vocab:
                    assert source.guess(4).tolist() == [likely] * n
            # a token that the draft model lacks is not read: drafts go on after many other tokens
            monkeypatch.setattr("kvtool.drafts.model._likeliest", lambda logits: (7, 1.0))
            source.add(np.array([n_vocab], np.int32))
            for n_more, n in ((1, 0), (400, 0), (200, 4)):
                source.add(np.arange(n_more, dtype=np.int32) % 200 + 3)
                assert len(source.guess(4)) == n


def generated(path, *more, prompt="go on: a b c a b c"):
    return run_kvtool("generate", prompt, "-m", path, "-n", 40, "--temp", 0, "--budget", 64, "-t", 1, *more)


def test_generate_reports_drafted_and_accepted_tokens(talker):
    with_guesses, without = (
        json.loads(generated(talker, "--json", "--draft", draft).stdout) for draft in ("lookup", "off")
    )
    assert with_guesses["text"] == without["text"]
    assert with_guesses["drafted"] >= with_guesses["accepted"] > 0
    assert without["drafted"] == without["accepted"] == 0
    stderr = generated(talker, "-v").stderr
    assert re.search(r"wrote 40 in [0-9.]+ s \([0-9]+ of [0-9]+ draft tokens\), ", stderr)


def test_generate_with_a_draft_model_writes_the_same_text(talker, tiny_model):
    for path in (talker, tiny_model(arch="lfm2")):
        done = generated(path, "--raw", "--draft", path)
        assert done.returncode == 0
        assert done.stdout == generated(path, "--raw", "--draft", "off").stdout


def test_impossible_draft_options_are_refused_with_one_line(talker, tiny_model):
    for path, draft, code, message in (
        (talker, tiny_model(n_vocab=500), 2, "it has another vocabulary; choose a smaller model"),
        (talker, "nothing", 3, "unknown model 'nothing'"),
        (tiny_model(arch="deepseek2"), "lookup", 2, "cannot be used with recall of tokens (MLA)"),
    ):
        done = generated(path, "--raw", "--draft", draft)
        assert (done.returncode, done.stdout) == (code, "")
        assert message in done.stderr
        assert done.stderr.startswith("kvtool: ")
    # without --draft, a model whose cache cannot remove draft tokens writes without draft tokens
    done = generated(tiny_model(arch="deepseek2"), "--raw", "--json")
    assert json.loads(done.stdout)["drafted"] == 0


def test_models_that_cannot_drop_tokens_get_no_draft_tokens():
    cannot = Layers((), can_drop=False)
    assert max_draft_tokens(WriteOptions(), cannot, policies.load("h2o"), 256) == 0
    with pytest.raises(UsageError, match="--draft lookup cannot be used with this model, which cannot drop"):
        max_draft_tokens(WriteOptions(given=frozenset({"draft"})), cannot, policies.load("h2o"), 256)


def test_large_recurrent_states_get_few_draft_tokens():
    for n_bytes, n in ((2**10, MAX_DRAFT), (2**26, 4), (2**30, 1)):
        layers = Layers((Layer(0, Kind.RECURRENT, 0, 0, 0, 0, n_bytes),))
        assert max_draft_tokens(WriteOptions(), layers, policies.load("h2o"), 256) == n
