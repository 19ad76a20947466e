"""Policies on a library without the patch: llama.cpp's own sequence calls have the same results."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import LibraryError
from kvtool.llama.sequence import SequenceContext, runs, shifts
from kvtool.measure import perplexity
from kvtool.policies.local import Local
from kvtool.policies.random import Random
from kvtool.policy import Merge, Plan
from tests import forked
from tests.cli import test_cli
from tests.cli.called import uncut
from tests.engine.running import open_engine, text

# runs the command line in a process where the patch is hidden from kvtool
UNPATCHED = (
    "import sys, kvtool.llama.library\n"
    "for module in list(sys.modules.values()):\n"
    "    if 'is_patched' in vars(module): module.is_patched = lambda: False\n"
    "from kvtool.cli import main\n"
    "sys.argv[0] = 'kvtool'\n"
    "main()"
)


@dataclass(frozen=True, slots=True)
class Alike(Random):
    """Random policy whose choice for the first row is used in every row."""

    def plan(self, view, state):
        keep = super(Alike, self).plan(view, state).keep
        return Plan(np.repeat(keep[:1], len(keep), axis=0))


# calls that reach llama.cpp


def test_runs_and_shifts_bring_kept_tokens_to_their_positions():
    rng = np.random.default_rng(5)
    for _ in range(300):
        n = int(rng.integers(1, 40))
        at = rng.permutation(rng.choice(120, n, replace=False)).astype(np.int32)
        table = {int(pos): cell for cell, pos in enumerate(at)}
        gone = rng.permutation(n)[: rng.integers(0, n + 1)]
        for first, end in runs(at, gone):
            table = {pos: cell for pos, cell in table.items() if not first <= pos < end}
        kept = np.delete(np.arange(n), gone)
        assert sorted(table.values()) == kept.tolist()
        # move the kept tokens to random places, in the same order
        to = np.empty(len(kept), np.int32)
        to[np.argsort(at[kept])] = np.sort(rng.choice(120, len(kept), replace=False))
        for first, end, delta in shifts(at[kept], to):
            moved = {pos + delta * (first <= pos < end): cell for pos, cell in table.items()}
            assert len(moved) == len(table)
            table = moved
        assert [table[pos] for pos in to.tolist()] == kept.tolist()


def test_neighbouring_tokens_share_one_call():
    at = np.array([7, 3, 4, 5, 20, 6], np.int32)
    assert list(runs(at, np.array([1, 2, 5]))) == [(3, 5), (6, 7)]
    assert list(runs(at, np.array([], int))) == []
    assert list(shifts(at, at)) == []
    assert list(shifts(at, at - 3)) == [(3, 21, -3)]
    assert list(shifts(at, np.where(at < 5, at, at + 2))) == [(5, 21, 2)]


# the same plan with and without the patch


@pytest.mark.share(1, "evict_every")
@pytest.mark.parametrize("evict_every", [1, 16])
@pytest.mark.parametrize("positions", ["original", "in-cache", "auto"])
@pytest.mark.parametrize("name", ["random", "streamingllm", "local"])
def test_plans_give_the_same_nll_with_and_without_the_patch(
    tiny_model, unpatch, name, positions, evict_every
):
    path = tiny_model(n_ctx_train=130)
    tokens = text(120 if positions == "original" else 300)
    policy = policies.fit(name, 48, evict_every)
    alike = Alike(policy.budget, policy.slack, policy.window) if name == "random" else policy
    with open_engine(path, alike, positions=positions) as patched:
        want = perplexity.stream(patched, tokens)
        n_bytes = patched.cache_bytes
        assert patched.n_evicted > 0
        assert patched.context.n_row > 1
    unpatch()
    with open_engine(path, policy, positions=positions) as plain:
        got = perplexity.stream(plain, tokens)
        assert isinstance(plain.context, SequenceContext)
        assert (plain.n_evicted, plain.n_restart) == (patched.n_evicted, patched.n_restart)
        assert plain.cache_bytes == n_bytes
    assert np.abs(got - want).max() < 1e-4


def test_full_runs_without_the_patch(tiny_model, unpatched):
    with open_engine(tiny_model(n_ctx_train=256), policies.fit("full", 200)) as plain:
        assert isinstance(plain.context, SequenceContext)
        assert np.isfinite(perplexity.stream(plain, text(150))).all()


@pytest.mark.parametrize("arch", ["gemma3", "lfm2"])
@pytest.mark.parametrize("name", ["full", "streamingllm"])
def test_sliding_and_recurrent_models_need_the_patch_with_any_policy(tiny_model, unpatched, arch, name):
    policy = policies.fit(name, 64, 8 if name == "streamingllm" else None)
    why = "without kvtool's patch, which models with sliding or recurrent layers need; build .*make setup$"
    with pytest.raises(LibraryError, match=why), open_engine(tiny_model(arch=arch), policy):
        pass


@pytest.mark.parametrize("positions", ["in-cache", "auto"])
def test_restored_stream_continues_like_the_saved_one(tiny_model, unpatched, positions):
    path, tokens = tiny_model(n_ctx_train=130), text(260)
    policy = policies.fit("streamingllm", 48, 8)

    def step(plain, token):
        plain.step(token)
        return plain.context.logits().copy()

    with open_engine(path, policy, positions=positions) as plain:
        want, saved = [], {}
        for at in range(len(tokens)):
            # evict before saving, so that keys are not yet rotated in some saved states
            if at % 9 == 0:
                plain.evict_if_due()
                saved[at] = {name: array.copy() for name, array in plain.save()}
            want.append(step(plain, tokens[at : at + 1]))
    with open_engine(path, policy, positions=positions) as restored:
        for at, state in saved.items():
            restored.restore(state)
            for i in range(at, min(at + 12, len(tokens))):
                assert np.abs(step(restored, tokens[i : i + 1]) - want[i]).max() < 1e-4


def test_policies_and_settings_that_need_the_patch_are_refused(tiny_model, unpatched):
    cases = [
        (tiny_model(), "h2o", {}, "without kvtool's patch, which the policy H2O needs"),
        (tiny_model(), "corm", {}, "which the policy CORM needs"),
        (tiny_model(), "streamingllm", {"prefill": "whole"}, "which reading a prompt whole, .* needs"),
    ]
    for path, name, settings, message in cases:
        with (
            pytest.raises(LibraryError, match=message) as caught,
            open_engine(path, policies.fit(name, 64, 8), **settings),
        ):
            pass
        assert "make setup" in str(caught.value)


@dataclass(frozen=True, slots=True)
class Whole(Local):
    """Policy that asks to read prompts whole."""

    prefill = "whole"


def test_policy_that_reads_prompts_whole_is_refused_before_reading(tiny_model, unpatched):
    with (
        pytest.raises(LibraryError, match="which reading a prompt whole, .* needs; build") as caught,
        open_engine(tiny_model(), Whole(64, 8)),
    ):
        pass
    assert "\n" not in str(caught.value)
    # this policy runs if its prompts are read in batches
    with open_engine(tiny_model(), Whole(64, 8), prefill="stream") as plain:
        assert plain.read(text(200)) == 200


def test_a_merge_is_refused(tiny_model, unpatched):
    @dataclass(frozen=True, slots=True)
    class Merging(Local):
        merges = True

        def plan(self, view, state):
            keep = super(Merging, self).plan(view, state).keep
            at = np.flatnonzero(keep[0])[:1].astype(np.int32)
            zero = np.zeros(1, np.int32)
            return Plan(keep, Merge(zero, at, at, np.ones(1, np.float32)))

    with (
        open_engine(tiny_model(), Merging(64, 8)) as plain,
        pytest.raises(LibraryError, match="which merging values needs"),
    ):
        perplexity.stream(plain, text(100))


# the command line without the patch


def kvtool(*arguments, stdin=""):
    return uncut(forked.run([sys.executable, "-c", UNPATCHED, *arguments], input=stdin))


NOTE = (
    "this llama.cpp was built without kvtool's patch: only full, local, random, streamingllm run, and all "
    "KV heads keep the same tokens; for the rest build the one that has it: make setup\n"
)


def test_a_chat_runs_without_the_patch_and_says_so(chat_model, tmp_path):
    turns = [f"line {i} of the chat, and some more words\n" for i in range(12)]
    args = ["chat", "-m", chat_model, "-n", 12, "-t", 1, "--temp", 0]
    args += ["--policy", "streamingllm", "--budget", 96]
    # the cells of a restored cache are in another order, so results in f16 would be rounded differently
    args += ["-ctk", "f32", "-ctv", "f32"]
    whole = kvtool(*args, "--session", tmp_path / "whole", stdin="".join(turns))
    assert (whole.returncode, whole.stderr) == (0, NOTE)
    first, second = (
        kvtool(*args, "--session", tmp_path / "parts", stdin="".join(part)) for part in (turns[:7], turns[7:])
    )
    assert first.stdout + second.stdout == whole.stdout


def test_eval_runs_without_the_patch_and_says_so(chat_model):
    passkey = "passkey", "--set", "lengths=300", "--limit", 1
    done = kvtool("eval", *passkey, "-m", chat_model, "-t", 1, "--policy", "streamingllm", "--budget", 96)
    assert (done.returncode, done.stderr) == (0, NOTE)


def test_other_policies_are_refused_before_the_model_is_loaded(chat_model, tmp_path):
    (tmp_path / "text").write_text("some words " * 40)
    for command in (
        ["perplexity", tmp_path / "text", "--policy", "h2o"],
        ["compare", tmp_path / "text", "--policies", "full,h2o"],
    ):
        done = kvtool(*command, "-m", chat_model)
        assert (done.returncode, done.stdout) == (4, "")
        assert done.stderr == (
            "kvtool: this llama.cpp was built without kvtool's patch, which h2o needs; build the one that "
            "has it: make setup, or choose one of full, local, random, streamingllm\n"
        )


def test_perplexity_is_the_same_without_the_patch(smol, tmp_path):
    (tmp_path / "text").write_text("The tide comes in twice a day, and twice a day it goes. " * 12)
    command = ["perplexity", tmp_path / "text", "-m", smol, "--policy", "streamingllm", "--budget", 32]
    plain, patched = (
        json.loads(run(*command, "-t", 1, "--json").stdout) for run in (kvtool, test_cli.kvtool)
    )
    assert plain["tokens"] == patched["tokens"]
    # with quantized weights, the order of sums changes the result
    assert plain["nll"] == pytest.approx(patched["nll"], abs=0.05)
