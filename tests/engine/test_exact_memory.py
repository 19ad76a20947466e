"""Exact reading if a thread that copies archived tokens runs out of memory: a failed chunk leaves no trace.

The archive is copied to host memory or to a worker. With a worker, the threads also archive evicted tokens.
The tests run this file as a module in another process, in which failing_new.cpp is preloaded.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import nullcontext

import numpy as np
import pytest

from kvtool.errors import OutOfMemory
from kvtool.llama.libllama.workers import add_rpc
from tests.engine import rpc_server
from tests.engine.exact_engines import LOGIT_TOLERANCE, fit_recall, open_engine, random_tokens

N_READ, N_ALL = 400, 550
"""Number of tokens before the failures, and of all tokens: the failures hit three chunks."""


def client(path, step, endpoint=""):
    """Print the number of failed chunks, and the largest difference of logits after them.

    Every step-th allocation fails, one after the other, while the same text is read again and again.
    """
    process, tokens = ctypes.CDLL(None), random_tokens(N_ALL)
    if endpoint:
        add_rpc(endpoint)
    settings = {"prefill": "exact", "archive_type": "q5_0/q4_0", "n_gpu_layers": 99 if endpoint else 0}
    n_failed, errors, expected = 0, [], None
    with open_engine(path, fit_recall(search="all"), **settings) as engine:
        engine.read(tokens[:N_READ])
        saved = dict(engine.save())
        for n in [0, *range(1, 80, int(step))]:
            engine.restore(saved)
            process.fail_new_elsewhere(n)
            try:
                engine.read(tokens[N_READ:])
            except OutOfMemory:
                n_failed += 1
            finally:
                process.fail_new_elsewhere(0)
            assert (engine.n_past - N_READ) % 64 == 0 or engine.n_past == N_ALL
            if engine.n_past < N_ALL:
                engine.read(tokens[engine.n_past :])
            logits = engine.context.logits()[-1].copy()
            expected = logits if expected is None else expected
            errors.append(float(np.abs(logits - expected).max()))
    print(json.dumps([n_failed, max(errors)]))


@pytest.mark.skipif(sys.platform != "linux", reason="a library is preloaded in another way")
@pytest.mark.parametrize("device", ["host", "worker"])
def test_failed_copies_leave_no_trace_of_a_chunk(tiny_model, run_preloaded, share_of, device):
    path = str(tiny_model(n_head_kv=2, n_ctx_train=2048))
    with nullcontext() if device == "host" else rpc_server.running() as endpoint:
        arguments = [path, str(share_of(3, 2)), *filter(None, [endpoint])]
        n_failed, error = run_preloaded("tests.engine.test_exact_memory", *arguments)
    assert n_failed > 10
    assert error < LOGIT_TOLERANCE


if __name__ == "__main__":
    client(*sys.argv[1:])
