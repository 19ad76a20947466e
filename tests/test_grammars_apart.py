"""Clients' grammars in a process of their own: what a line of grammar can do to a server."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing

import pytest

from kvtool.errors import UsageError
from kvtool.llama.model import Model
from kvtool.serve.grammars import Grammars

ENDLESS = "root ::= " + "(" * 4 + '"a"?' + "){50}" * 4


@pytest.fixture
def path(tiny_model):
    return tiny_model()


@pytest.fixture
def grammars(path):
    with closing(Grammars(path, step_s=0.5)) as own:
        yield own


@pytest.mark.parametrize(
    ("grammar", "why"),
    [(ENDLESS, "takes more than 0.5 s"), ("root ::= " + "(" * 100_000, "crashed"), ("root ::= [", "parse")],
    ids=["endless", "deep", "broken"],
)
def test_a_bad_grammar_is_one_line_and_the_next_one_is_taken(grammars, path, grammar, why):
    model = Model(path, vocab_only=True)
    with pytest.raises(UsageError, match=why):
        grammars.begin(model, grammar)
    assert grammars.begin(model, 'root ::= "a"').fitting().any()


def test_a_step_may_wait_for_a_busy_machine(grammars, path):
    """The process is stopped for longer than a step may take."""
    model = Model(path, vocab_only=True)
    own = grammars.begin(model, 'root ::= "a"')
    pid = grammars._process.pid
    os.kill(pid, signal.SIGSTOP)

    def go_on():
        time.sleep(1)
        os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        assert own.fitting().any()
    finally:
        thread.join()
