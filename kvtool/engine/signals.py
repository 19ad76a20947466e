"""Signals that a policy reads, and their window: the tokens whose queries are included in the signals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvtool.engine.rows import Rows
from kvtool.errors import PlanError
from kvtool.policy import PER_CELL, Signal

if TYPE_CHECKING:
    from kvtool.llama.cache.full_context import AnyContext


_QUERIES = ("queries", "queries_pos")
"""Names of a snapshot's arrays for FUTURE: the last queries, and the positions that they are rotated to."""


class Signals:
    """A policy's signals: sums over the attention of a window of tokens, which ends with the newest token.

    Attributes
    ----------
    by_field
        Signals that the policy reads, by their field in a view.
    since
        Start of the window: `Rows.n_past` when the signals were cleared.
    is_observed
        True once the policy has observed this window. If its plan then fails, it must not observe the window
        again.
    """

    since: int
    is_observed: bool

    def __init__(self, reads: Signal, context: AnyContext, rows: Rows) -> None:
        self.by_field = {name: signal for signal, name in PER_CELL.items() if signal in reads}
        self._context = context
        self._rows = rows

    @property
    def n_new(self) -> int:
        """Number of tokens in the window. They are in the last live cells."""
        return self._rows.n_past - self.since

    def begin(self) -> None:
        """Begin a new window after an edit of the cache, because each edit clears the library's signals."""
        self.since, self.is_observed = self._rows.n_past, False

    def clear(self) -> None:
        """Clear the signals and begin a new window."""
        self._context.clear_signals()
        self.begin()

    def read(self) -> dict[str, np.ndarray]:
        """Return each signal by its field in a view. Raises PlanError if a value is not finite."""
        values = {name: self._context.read(signal, self._rows.n_kv) for name, signal in self.by_field.items()}
        if any(not np.isfinite(array).all() for array in values.values()):
            raise PlanError(f"the model's attention is not finite; {self._context.suspect}")
        if "important" in values:
            query = self._converted(Signal.IMPORTANT, values["important"]).astype(np.int32)
            values["important"] = np.where(query > 0, query + np.int32(self.since), 0)
        return values

    def save(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, array) of all that `restore` needs.

        For each signal, the array is the result of `Context.history`, converted by `_converted`. The other
        arrays are the last queries, if the policy reads FUTURE, and "is_observed", if it is True.
        """
        for name, signal in self.by_field.items():
            yield name, self._converted(signal, self._context.history(signal, self._rows.n_kv))
        if self._context.queries:
            yield from zip(_QUERIES, self._context.queries.save(), strict=True)
        if self.is_observed:
            yield "is_observed", np.ones(1, np.bool_)

    def fits(self, saved: Mapping[str, np.ndarray], n_kv: int) -> bool:
        """True if the arrays have the shapes that `save` yields for n_kv cells.

        Raises KeyError for a missing array.
        """
        if self._context.queries and not self._context.queries.fits(*(saved[name] for name in _QUERIES)):
            return False
        return all(
            values.dtype == np.float32 and values.shape == self._context.history_shape(signal, n_kv)
            for signal, values in self._parts(saved)
        )

    def restore(self, saved: Mapping[str, np.ndarray], since: int) -> None:
        """Continue from the arrays that `save` yielded for the window that began at `since`."""
        self.since, self.is_observed = since, "is_observed" in saved
        for signal, values in self._parts(saved):
            self._context.write(signal, self._converted(signal, values))
        if self._context.queries:
            self._context.queries.restore(*(saved[name] for name in _QUERIES))

    def _parts(self, saved: Mapping[str, np.ndarray]) -> Iterator[tuple[Signal, np.ndarray]]:
        for name, signal in self.by_field.items():
            values = saved[name]
            if signal is Signal.RECENT and values.ndim == 2:
                # older sessions saved only the sum over the last queries: restore it as the attention of the
                # last query
                history = np.zeros(self._context.history_shape(signal, values.shape[1]), np.float32)
                history[-1] = values
                values = history
            yield signal, values

    def _converted(self, signal: Signal, values: np.ndarray) -> np.ndarray:
        """Convert the queries in IMPORTANT from index to age, or from age to index.

        The index is 1 for the window's first query. The age is 1 for the window's newest query. 0 (no query)
        stays 0. Other signals are returned unchanged.
        """
        return np.where(values > 0, self.n_new + 1 - values, 0) if signal is Signal.IMPORTANT else values
