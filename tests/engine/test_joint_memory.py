"""Joint steps that run out of memory: the streams continue as if the failed step had not begun.

This is tested for every allocation that can fail.

The test runs this file as a module in another process, in which failing_new.cpp is preloaded.
"""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import ExitStack, closing

import numpy as np
import pytest

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import LibraryError
from kvtool.llama.cache.joint import JointContext, Part
from kvtool.llama.loaded.model import Model
from tests.engine.exact_engines import LOGIT_TOLERANCE, random_tokens

N_READ, N_MAX = 20, 350


def client(path):
    """Print the number of joint steps that failed, and the largest difference of logits.

    In the nth joint step, the step's nth allocation fails. The members of a failed step decode their tokens
    one by one. The logits are compared with a stream that is decoded without joint steps.
    """
    process, tokens = ctypes.CDLL(None), random_tokens(N_MAX)
    exact = Settings(type_k="f32", type_v="f32", flash="off", n_threads=1, n_batch=32)
    n_failed, errors = 0, []
    with ExitStack() as stack:
        model = stack.enter_context(closing(Model(path)))
        policy = policies.fit("full", N_MAX)
        engines = [stack.enter_context(closing(Engine(model, policy, exact))) for _ in range(3)]
        single, *members = [engine.context for engine in engines]
        for engine in engines:
            engine.read(tokens[:N_READ])
        joint = stack.enter_context(closing(JointContext(members[0], 2, 4)))
        for n_past in range(N_READ, N_MAX):
            token = tokens[n_past : n_past + 1]
            single.decode(token, n_past, 1)
            process.fail_new(n_past - N_READ + 1)
            try:
                joint.decode([Part(context, token, n_past, 1) for context in members])
            except LibraryError:
                n_failed += 1
                for context in members:
                    context.decode(token, n_past, 1)
            finally:
                process.fail_new(0)
            errors += [float(np.abs(context.logits() - single.logits()).max()) for context in members]
    print(json.dumps([n_failed, max(errors)]))


@pytest.mark.skipif(sys.platform != "linux", reason="a library is preloaded in another way")
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_failed_allocations_leave_no_trace_of_a_joint_step(tiny_model, run_preloaded, arch):
    n_failed, errors = run_preloaded("tests.engine.test_joint_memory", str(tiny_model(arch=arch)))
    assert n_failed > 100
    assert errors < LOGIT_TOLERANCE


if __name__ == "__main__":
    client(*sys.argv[1:])
