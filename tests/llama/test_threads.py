"""The number of decoding threads is chosen by the times of steps. The tests simulate these times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtool import policies
from kvtool.build import wheel
from kvtool.llama.cache.threads import Threads
from kvtool.measure import perplexity
from kvtool.system import cgroups, cpu
from tests.engine.exact_engines import open_engine


def run(threads, seconds, n_step, n_tokens=1):
    """Record n_step steps. A step with n threads takes seconds(n).

    Return the share of steps with each number of threads.
    """
    counts = {}
    for _ in range(n_step):
        n = threads.n
        counts[n] = counts.get(n, 0) + 1
        threads.record(n_tokens, seconds(n))
    return {n: count / n_step for n, count in counts.items()}


def idle(n):
    return 0.08 / n + 0.002


def busy(n):
    """Return the time of a step if another program uses one of 8 cores.

    With 8 threads, each step waits for that core.
    """
    return idle(n) * (6 if n == 8 else 1)


def full(n):
    """Return the time of a step if other programs use all cores.

    Each further thread makes all threads wait longer.
    """
    return idle(1) * n


TWO_EACH = [f"{n % 4},{n % 4 + 4}" for n in range(8)]
"""Siblings of 8 CPUs on 4 cores: CPU n and CPU n + 4 share a core."""


@pytest.mark.parametrize(
    ("allowed", "siblings", "smt", "n"),
    [
        (range(8), TWO_EACH, "1", 4),
        (range(4), TWO_EACH, "1", 4),
        ({1, 3, 5}, TWO_EACH, "1", 2),
        ({6}, TWO_EACH, "1", 1),
        (range(8), "01234567", "0", 8),
        # in the next three cases, Linux does not tell which CPUs share a core. In the last case, Linux also
        # does not tell whether any CPUs share a core
        (range(8), [], "1", 4),
        ({6}, [], "1", 1),
        (range(8), [], None, 8),
    ],
)
def test_default_threads_is_the_number_of_usable_cores(tmp_path, monkeypatch, allowed, siblings, smt, n):
    monkeypatch.setattr(cpu, "_CPUS", tmp_path)
    monkeypatch.setattr(cgroups, "_OF_PROCESS", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed), raising=False)
    if smt:
        (tmp_path / "smt").mkdir()
        (tmp_path / "smt" / "active").write_text(f"{smt}\n")
    for i, text in enumerate(siblings):
        topology = tmp_path / f"cpu{i}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")
    assert cpu.default_threads() == n


@pytest.mark.parametrize(
    ("line", "quotas", "n"),
    [
        ("0::/a/b", {"a/b": "150000 100000", "a": "max 100000", ".": "400000 100000"}, 2),
        ("0::/a/b", {"a/b": "800000 100000", "a": "300000 100000"}, 3),
        ("0::/a/b", {"a/b": "9000000 100000"}, 8),
        ("0::/a/b", {"a/b": "max 100000"}, 8),
        ("5:cpu,cpuacct:/a", {"cpu/a": "5000 100000"}, 1),
        ("5:cpu,cpuacct:/a", {"cpu/a": "-1 100000", "cpu": "400000 100000"}, 4),
        ("5:cpuset:/a", {"cpu/a": "5000 100000"}, 8),
    ],
)
def test_quotas_of_control_groups_limit_the_threads(tmp_path, monkeypatch, line, quotas, n):
    monkeypatch.setattr(cpu, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cgroups, "_OF_PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_GROUPS", tmp_path)
    (tmp_path / "cgroup").write_text(f"1:name=systemd:/x\n{line}\n")
    for path, text in quotas.items():
        (folder := tmp_path / path).mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{text}\n")
        for name, number in zip(("quota", "period"), text.split(), strict=True):
            (folder / f"cpu.cfs_{name}_us").write_text(f"{number}\n")
    assert cpu.default_threads() == cpu.n_cpu() == n
    monkeypatch.setattr(wheel, "total_bytes", lambda: 10**12)
    monkeypatch.delenv("CMAKE_BUILD_PARALLEL_LEVEL", raising=False)
    assert wheel.build_env(tmp_path, "", stock=False, portable=False)["CMAKE_BUILD_PARALLEL_LEVEL"] == str(n)


def test_all_threads_are_used_on_an_idle_machine():
    assert run(Threads(8), idle, 5000)[8] > 0.985


@pytest.mark.parametrize(("seconds", "n", "least"), [(busy, 6, 0.95), (full, 1, 0.95)])
def test_fewer_threads_are_used_next_to_other_programs(seconds, n, least):
    threads = Threads(8)
    # the first 200 steps include trials and are not measured
    run(threads, seconds, 200)
    assert run(threads, seconds, 2000)[n] > least


def test_changes_between_busy_and_idle_are_noticed_soon():
    threads = Threads(2)
    run(threads, idle, 5000)
    # six slow steps start a trial of three steps
    run(threads, full, 9)
    assert threads.n == 1
    run(threads, full, 1000)
    run(threads, idle, round(10 / idle(1)))
    assert run(threads, idle, 200)[2] > 0.9


def test_a_trial_that_is_far_slower_costs_one_step():
    threads = Threads(2)
    run(threads, full, 20)
    n_threads = [threads.n for _ in range(400) if not threads.record(1, full(threads.n) * threads.n)]
    tried = "".join(map(str, n_threads)).split("1")
    assert max(map(len, tried)) == 1


def test_steps_of_other_lengths_are_not_compared():
    threads = Threads(2)
    # ten steps of 1 ms are over before a trial is due
    assert run(threads, lambda n: 0.001, 10) == {2: 1.0}
    # steps of more tokens are slower, but this must not start a trial
    assert run(threads, lambda n: 0.01, 20, n_tokens=256) == {2: 1.0}


def test_unfinished_trial_changes_nothing():
    threads = Threads(2)
    run(threads, idle, 8)
    assert threads.n == 1
    threads.record(1, idle(1) / 100)
    threads.record(5, 0.1)
    assert threads.n == 2


def test_one_thread_stays_one():
    assert run(Threads(1), full, 100) == {1: 1.0}


class Alternating:
    """Stand-in for Threads that alternates between two numbers of threads, 1 and 2."""

    def __init__(self, most):
        self.n = most

    def record(self, n_tokens, seconds):
        self.n = 3 - self.n


@pytest.mark.parametrize(("policy", "types"), [("h2o", "f16"), ("recall", "f16"), ("streamingllm", "q8_0")])
def test_nll_does_not_depend_on_the_number_of_threads(smollm2, monkeypatch, share_of, policy, types):
    options = {"type_k": types, "type_v": types, "n_batch": 16, "n_output": 16}
    options["flash"] = "on" if types == "q8_0" else "off"
    nll = []
    for n_threads in (1, 2, None):
        if n_threads is None:
            monkeypatch.setattr("kvtool.llama.cache.decoder.default_threads", lambda: 2)
            monkeypatch.setattr("kvtool.llama.cache.decoder.has_gpu", lambda: False)
            monkeypatch.setattr("kvtool.llama.cache.decoder.Threads", Alternating)
        with open_engine(smollm2, policies.fit(policy, 24), n_threads=n_threads, **options) as engine:
            tokens = engine.model.tokenize(Path(__file__).read_text())[: share_of(32, 80)]
            nll.append(perplexity.stream(engine, tokens))
            assert engine.n_evicted
    assert (nll[0] == nll[1]).all()
    assert (nll[0] == nll[2]).all()
