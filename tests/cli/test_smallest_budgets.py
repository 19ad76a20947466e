"""Errors about budgets that are too small name a budget that works. One cell less would not work."""

from __future__ import annotations

import re
from itertools import product

import pytest

from kvtool import policies
from kvtool.errors import UsageError
from tests.cli.in_process_command import run_kvtool
from tests.engine.exact_engines import open_engine

EVICTING = [name for name in policies.names() if policies.load(name).evicts]
SHAPES = {
    "one query head a row": ("llama", {"n_head_kv": 4}),
    "four": ("llama", {"n_head_kv": 1}),
    "MLA": ("deepseek2", {}),
}
TEXT = "The tide came in, twice a day. " * 8


def named(done):
    """Return the budget that the error of a command names."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    return int(re.search(r"(?:use at least|a budget of at least) (\d+)\n", done.stderr)[1])


def check(run):
    """Check that errors name the smallest budget that works.

    run(budget) calls a command with this budget.
    """
    least = named(run(1))
    assert named(run(0)) == named(run(least - 1)) == least
    done = run(least)
    assert done.returncode == 0, done.stderr


# the model changes the smallest budget only with recall
@pytest.mark.parametrize(
    ("shape", "name"),
    [*(("four", name) for name in EVICTING), *product(("one query head a row", "MLA"), ("recall", "h2o"))],
)
def test_smallest_budget_named_by_the_error_works_for_every_policy(tiny_model, shape, name):
    arch, sizes = SHAPES[shape]
    path = tiny_model(arch, **sizes)
    options = ("--raw", "-n", 4, "-t", 1, "-m", path, "--policy", name)
    check(lambda budget: run_kvtool("generate", TEXT, *options, "--budget", budget))


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("perplexity", ()),
        ("inspect", ("--json",)),
        ("compare", ("--policies", "recall")),
        ("eval", ("passkey", "--set", "lengths=300", "--limit", 1, "--raw")),
        ("generate", ("--raw", "-n", 1, "--evict-every", 5)),
        ("generate", ("--raw", "-n", 1, "-o", "sinks=9")),
    ],
)
def test_every_command_names_the_smallest_budget_that_works(tiny_model, command, more):
    options = ("-t", 1, "-m", tiny_model(n_head_kv=1))
    check(lambda budget: run_kvtool(command, *more, *options, "--budget", budget, stdin=TEXT))


# with recall, `pin` does not fail, but pins only a part of the text
@pytest.mark.parametrize("name", [name for name in EVICTING if not policies.load(name).has_recall()])
def test_budget_named_for_a_pinned_text_works(tiny_model, name):
    path = tiny_model(n_head_kv=1, n_ctx_train=1024)
    with (
        open_engine(path, policies.fit(name, 40)) as engine,
        pytest.raises(UsageError, match="choose a larger budget") as caught,
    ):
        engine.pin(100)
    n = int(re.search(r"choose a larger budget \((\d+) is enough", str(caught.value))[1])
    with open_engine(path, policies.fit(name, n)) as engine:
        engine.pin(100)


def test_counts_of_a_refused_text_have_separators(tiny_model):
    path = tiny_model(n_head_kv=1, n_ctx_train=4096)
    with (
        open_engine(path, policies.fit("h2o", 1024, 64)) as engine,
        pytest.raises(UsageError, match=r" 2,000 tokens, and a budget of 1,024 .* \(2,1[0-9]{2} is enough\)"),
    ):
        engine.pin(2000)


@pytest.mark.parametrize("policy", ["recall", "streamingllm", "h2o"])
@pytest.mark.parametrize("system", [None, "word " * 9])
def test_budget_named_for_a_chat_is_the_smallest_that_works(talker, policy, system):
    def chat(budget):
        options = ("-m", talker, "-n", 1, "-t", 1, "--policy", policy, "--budget", budget)
        return run_kvtool("chat", *options, *(("--system", system) if system else ()), stdin="one\n")

    n = int(re.search(r"use at least (\d+), and a few more in a chat\n", chat(1).stderr)[1])
    # the budget that is named next may have room for the system prompt only
    while (done := chat(n)).returncode:
        assert done.returncode == 2
        n, before = int(re.search(r"choose a larger budget \((\d+) is enough\)", done.stderr)[1]), n
        assert n > before
        if "chat template" in done.stderr:
            # the advice does not depend on the budget that was too small
            assert f"({n} is enough)" in chat(n - 1).stderr
