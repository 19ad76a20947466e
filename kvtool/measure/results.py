"""Records of a grid's runs, and comparisons between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtool.measure import records
from kvtool.measure.grid import KEY, Common, Run, identity
from kvtool.measure.statistics import mean_of_text

_AGAINST_BEST = ("best_other", "nll_minus_best", "nll_minus_best_stderr", "nll_minus_best_margin")
"""Fields that compare a run with the best other run of its group."""


@dataclass(slots=True)
class ComparisonResults:
    """Records of a grid. of_run: the record of each run that has one."""

    common: Common
    grid: Sequence[Run]
    of_run: dict[Run, dict[str, Any]] = field(default_factory=dict)

    def add(self, stored: Iterable[dict[str, Any]]) -> None:
        """Assign a file's records to runs. Records of other grids are ignored.

        If a run has several records, use the record with the highest `_rank`, and among equals the first.
        """
        by_key = {records.key(identity(self.common, run), KEY): run for run in self.grid}
        for record in stored:
            run = by_key.get(records.key(record, KEY))
            if run and _rank(record) > _rank(self.of_run.get(run)):
                self.of_run[run] = record

    def missing(self, kl: bool = False) -> list[Run]:
        """Return the runs that have no record or failed. kl: True to add the runs without a divergence."""
        return [run for run in self.grid if _rank(self.of_run.get(run)) < (3 if kl else 2)]

    def failed(self) -> list[Run]:
        """Return the runs whose record is an error."""
        return [run for run in self.grid if _rank(self.of_run.get(run)) == 1]

    def compared(self) -> list[tuple[Run, dict[str, Any]]]:
        """Return the runs that have a record, in order, with their records.

        The records also have the fields of `_AGAINST_BEST`, unless the run failed.
        """
        done = [(run, self.of_run[run]) for run in self.grid if run in self.of_run]
        return [(run, r if "error" in r else r | self._against_best(run)) for run, r in done]

    def _against_best(self, run: Run) -> dict[str, Any]:
        """Return the fields that compare a run's nll with that of the best other run of its group.

        The difference, its error and its margin are computed from the nll of blocks of tokens.
        """
        others = [
            (self.of_run[other]["nll"], i)
            for i, other in enumerate(self.grid)
            if other.group == run.group
            and other != run
            and run.typed_budget is not None
            and "nll" in self.of_run.get(other, {})
        ]
        if not others:
            return dict.fromkeys(_AGAINST_BEST)
        best = self.grid[min(others)[1]]
        record, other = self.of_run[run], self.of_run[best]
        mean = mean_of_text(np.subtract(record["nll_blocks"], other["nll_blocks"]), record["n_scored"])
        return dict(zip(_AGAINST_BEST, (best.label, *mean), strict=True))


def _rank(record: Mapping[str, Any] | None) -> int:
    """Rank of a record: 0 for None, 1 for an error, 2 if it has no divergence, 3 if it is complete.

    A divergence is missing if the run of `full` failed.
    """
    if record is None or "error" in record:
        return int(record is not None)
    return 2 if record.get("kl") is None else 3
