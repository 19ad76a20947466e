"""The papers' experiments: their runs and their tables, a module for each paper."""

from __future__ import annotations

from lab.papers.experiments import bumblebee, buzz, corm, fading, ruler, tasks, weightedkv, which
from lab.papers.experiments.kinds import Experiment, Run

_MODULES = (weightedkv, buzz, bumblebee, corm, tasks, which, fading, ruler)

RUNS: dict[str, Run] = {name: run for module in _MODULES for name, run in module.RUNS.items()}
EXPERIMENTS: dict[str, Experiment] = {
    name: each for module in _MODULES for name, each in module.EXPERIMENTS.items()
}
