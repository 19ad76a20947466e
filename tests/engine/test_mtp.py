"""Draft tokens from a model's own layers for multi-token prediction (MTP)."""

from __future__ import annotations

import json
from contextlib import closing, contextmanager

import numpy as np
import pytest

from kvtool import policies
from kvtool.chats.writer import Writer
from kvtool.drafts import mtp
from kvtool.drafts.drafter import Drafter
from kvtool.drafts.lookup import Lookup
from kvtool.llama.cache.mtp import output_hidden, read_hidden
from kvtool.llama.libllama.library import LibraryError
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.llama.sampling import Sampling
from tests import tiny
from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.engine.exact_engines import open_engine, random_tokens

pytestmark = pytest.mark.usefixtures("however_unlikely")

N_DRAFT = 4
MEMORY = 64 * 2**20


class Nothing(Lookup):
    def look(self):
        return 0


@contextmanager
def open_writer(path, policy="full", *, drafts=True):
    """Open a greedy writer. With `drafts`, all its draft tokens come from MTP layers."""
    options = {"full": (500,), "recall": (64, 16, ["search=all"])}.get(policy, (64, 16))
    settings = {"n_draft": N_DRAFT * drafts, "n_output": 1, "archive_type": "f32", "checkpoints": MEMORY}
    with (
        open_engine(path, policies.fit(policy, *options), mtp=drafts, **settings) as engine,
        closing(Sampler(engine.model, Sampling(temp=0))) as sampler,
    ):
        if not drafts:
            yield Writer(engine, sampler)
            return
        with closing(mtp.MtpDraft(engine)) as source:
            yield Writer(engine, sampler, Drafter(Nothing(), source))


def source_of(writer):
    return writer.drafter._model


POLICIES = ("full", "recall", "streamingllm", "h2o")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quiet", [0.0, 0.1])
def test_written_text_does_not_depend_on_draft_tokens(tiny_model, policy, quiet):
    path, texts = tiny_model(arch="qwen35", quiet=quiet, n_ctx_train=512), []
    for drafts in (False, True):
        with open_writer(path, policy, drafts=drafts) as writer:
            writer.read(random_tokens(100))
            texts.append("".join(writer.write(300)))
    assert texts[0] == texts[1]
    assert 50 < writer.n_accepted <= writer.n_drafted
    assert (writer.n_accepted == writer.n_drafted) == (quiet == 0)
    assert writer.engine.n_evicted > 100 or policy == "full"


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_rewound_stream_continues_with_the_same_text(tiny_model, policy):
    with open_writer(tiny_model(arch="qwen35", quiet=0.1, n_ctx_train=512), policy) as writer:
        writer.read(random_tokens(100))
        saved, n = writer.save(), writer.engine.n_past
        expected = "".join(writer.write(60))
        # read another text in between; its cells and hidden states must not be used later
        assert writer.rewind(n - 30, saved)
        writer.read(random_tokens(90, seed=5))
        "".join(writer.write(20))
        n_before = writer.n_accepted
        assert writer.rewind(n - 30, saved)
        writer.read(random_tokens(100)[n - 30 :])
        assert "".join(writer.write(60)) == expected
        assert writer.n_accepted > n_before
        tokens = source_of(writer)._stream.tolist()
        assert tokens == writer.tokens[: len(tokens)].tolist()


def shrink(monkeypatch, n_row):
    """Limit the MTP layers' cache to n_row tokens.

    From a longer stream, only the first 4 and the newest 16 tokens stay.
    """
    monkeypatch.setattr(mtp, "_N_ROW", n_row)
    monkeypatch.setattr(mtp, "_N_FIRST", 4)
    monkeypatch.setattr(mtp, "_N_NEWEST", 16)


def drafts_by_definition(path, tokens, positions):
    """Return the draft tokens that follow a stream i32[n].

    All tokens of the stream except for the last are read one by one.
    positions: positions of the tokens whose hidden states the MTP layer reads.
    """
    options = {"n_output": 1, "mtp": True}
    with (
        open_engine(path, policies.fit("full", 500), **options) as engine,
        closing(mtp.MtpContext(engine.context, 512, 1, 1)) as layer,
    ):
        output_hidden(engine.context, every=True)
        hidden = np.empty((len(tokens) - 1, 1, 128), np.float32)
        for i in range(len(hidden)):
            engine.step(tokens[i : i + 1])
            read_hidden(engine.context, 0, hidden[i])
        for i, pos in enumerate(positions):
            layer.step(tokens[pos + 1], hidden[pos], i)
        drafts = []
        for i in range(len(positions), len(positions) + N_DRAFT):
            drafts.append(int(layer.next_logits.argmax()))
            layer.step(drafts[-1], layer.hidden.copy(), i)
        return drafts


@pytest.mark.parametrize("n_row", [497, 40])
def test_draft_tokens_match_the_definition_after_any_history(tiny_model, monkeypatch, n_row):
    shrink(monkeypatch, n_row)
    path, rng = tiny_model(arch="qwen35", quiet=0.3, hidden=1.0), np.random.default_rng(0)
    with open_writer(path) as writer:
        engine, source, stream = writer.engine, source_of(writer), random_tokens(1)
        source.add(stream)
        n_compared = 0
        for turn in range(40):
            # `stream` has all decoded tokens and the next token. A writer passes such a stream to its source
            # before it asks for drafts
            if turn % 6 in (0, 3, 5):
                engine.checkpoints.take()
                more = random_tokens(int(rng.integers(5, 25)), seed=turn)
                engine.read(np.concatenate([stream[-1:], more[:-1]]))
                stream = np.concatenate([stream, more])
            elif turn % 6 in (1, 4):
                n_true = int(rng.integers(0, N_DRAFT))
                drafts = random_tokens(N_DRAFT, seed=turn)
                engine.draft(np.concatenate([stream[-1:], drafts]))
                engine.drop_drafts(N_DRAFT - n_true)
                stream = np.concatenate([stream, drafts[:n_true], random_tokens(1, seed=turn + 50)])
            else:
                n = engine.rewind(max(engine.n_past - int(rng.integers(1, 9)), 0))
                source.cut(n)
                stream = np.concatenate([stream[:n], random_tokens(1, seed=turn)])
            assert engine.n_past == len(stream) - 1
            if rng.random() < 0.4:
                continue
            source.cut(len(stream) - 1)
            source.add(stream[source.n :])
            positions = source._pos[: source._n_row]
            if engine.n_past - 1 in positions:
                n_compared += 1
                assert source.guess(N_DRAFT).tolist() == drafts_by_definition(path, stream, positions)
        assert (source._n_row > 60) == (n_row > 40)
        assert n_compared > 12


def test_hidden_states_are_limited_to_first_and_newest_tokens(tiny_model, monkeypatch):
    shrink(monkeypatch, 40)
    with open_writer(tiny_model(arch="qwen35", quiet=0.0)) as writer:
        writer.read(random_tokens(150))
        source = source_of(writer)
        for _ in range(4):
            "".join(writer.write(50))
            pos = source._pos[: source._n_row]
            n = len(pos)
            assert 20 <= n <= 40
            assert pos.tolist() == [*range(4), *range(pos[-1] + 5 - n, pos[-1] + 1)]
            assert len(source._hidden) == 40
        assert writer.n_accepted == writer.n_drafted > 100
        # go back so far that only the first hidden states are left
        source.cut(2)
        assert source._pos[: source._n_row].tolist() == [0, 1]


def test_steps_decoded_in_another_context_give_no_drafts(tiny_model):
    with open_writer(tiny_model(arch="qwen35", quiet=0.0)) as writer:
        tokens, engine, source = random_tokens(50), writer.engine, source_of(writer)
        source.add(tokens)
        engine.read(tokens[:40])
        # replace the logits, as a joint step with other streams does
        logits = engine.context.logits().copy()
        decode = engine.context.decode

        def elsewhere(*arguments):
            decode(*arguments)
            engine.context.set_logits(logits)

        engine.context.decode = elsewhere
        engine.step(tokens[40:49])
        assert len(source.guess(N_DRAFT)) == 0
        engine.context.decode = decode
        engine.step(tokens[49:])
        source.add(tokens[:1])
        assert len(source.guess(N_DRAFT)) == N_DRAFT


def test_mtp_layers_are_loaded_only_on_request(tiny_model):
    path = tiny_model(arch="qwen35")
    for loads_mtp in (False, True):
        with closing(Model(path, mtp=loads_mtp)) as model:
            assert model.has_mtp == loads_mtp
    with closing(Model(tiny_model(), mtp=True)) as model:
        assert not model.has_mtp


def test_hidden_states_that_do_not_exist_are_refused(tiny_model):
    with open_writer(tiny_model(arch="qwen35")) as writer:
        engine = writer.engine
        out = np.empty((3, 128), np.float32)
        with pytest.raises(LibraryError, match="left no hidden state of token 0"):
            read_hidden(engine.context, 0, out)
        engine.step(random_tokens(5))
        read_hidden(engine.context, 2, out)
        for first in (-1, engine.context.n_batch - 2):
            with pytest.raises(LibraryError, match="first and n must be"):
                read_hidden(engine.context, first, out)


def generated(path, *more):
    return run_kvtool("generate", "go on", "-m", path, "-n", 40, "--temp", 0, "--raw", "-t", 1, *more)


def test_generate_accepts_more_draft_tokens_with_mtp_than_with_lookup(tiny_model):
    path = tiny_model(arch="qwen35", quiet=0.0)
    results = [
        json.loads(generated(path, "--json", "--draft", draft).stdout) for draft in ("off", "lookup", "mtp")
    ]
    assert results[0]["text"] == results[1]["text"] == results[2]["text"]
    assert results[0]["accepted"] < results[1]["accepted"] < results[2]["accepted"]


def test_model_without_mtp_layers_is_refused(tiny_model):
    for path in (tiny_model(), tiny_model(arch="qwen35", mtp=False)):
        done = generated(path, "--draft", "mtp")
        assert_one_line(
            done, 2, "its file has no layers for multi-token prediction (MTP); choose --draft lookup"
        )


def test_continued_chat_says_the_same_with_and_without_mtp(tiny_model, tmp_path):
    path = tiny_model(arch="qwen35", quiet=0.1, chat_template=tiny.CHAT_TEMPLATE)
    exported = []
    for draft in ("off", "mtp"):
        file = tmp_path / f"{draft}.kvs"
        for turns in ("one\ntwo\n", "three\n", "four\n"):
            more = ["--budget", 96, "--temp", 0] if turns.startswith("one") else []
            done = run_kvtool(
                *("chat", "-m", path, "-n", 20, "-t", 1, "--session", file, "--draft", draft, *more),
                stdin=turns,
            )
            assert done.returncode == 0, done.stderr
        exported.append(json.loads(run_kvtool("session", "export", "--json", file).stdout))
    assert exported[0] == exported[1]
    assert len(exported[0]) == 8
