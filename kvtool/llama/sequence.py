"""A cache that is edited by llama.cpp's sequence calls.

This cache is used if llama.cpp has no patch, and for models that can only run with the policy `full`. A
sequence call removes or shifts whole tokens, in all layers and heads at once. A policy therefore sees a cache
of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

import numpy as np

from kvtool.errors import LibraryError
from kvtool.llama.context import Context
from kvtool.llama.decoder import Decoder
from kvtool.llama.library import HOW_TO_BUILD, UNPATCHED
from kvtool.llama.model import Model
from kvtool.models.header import read
from kvtool.policy import Merge


class SequenceContext(Decoder):
    """A cache of one row, for a policy that reads no signal and whose rows are not ragged.

    llama.cpp has no numbers for cells, and finds a cell by its position. A table in this class numbers the
    cells.

    Parameters
    ----------
    how
        Arguments of `Decoder`.
    """

    n_row = 1
    # length of a key: 0, because no policy that reads keys runs with this cache
    n_dim = 0
    archive = queries = fixed_state = None

    def __init__(self, model: Model, n_cell: int, n_batch: int, **how: Any) -> None:
        super().__init__(model, n_cell, n_batch, **how)
        self._cell_bytes = model.layers.cell_bytes(how.get("type_k", "f16"), how.get("type_v", "f16"))
        self.cache_bytes = self.n_ctx * self._cell_bytes
        self.row_layers = np.zeros(1, np.int32)
        self.n_head = np.full(1, sum(read(model.path).n_head), np.int32)
        self.layer_cells = np.array([n_cell], np.int32)
        self.n_cell = n_cell
        # `_at`: the position that each cell has in llama.cpp now. `_pos_of`: the position that it will have
        # at the next decode, after the recorded shifts
        self._at = self._pos_of = np.empty(0, np.int32)

    def signal_bytes(self, _n_cell: np.ndarray) -> int:
        """Return 0: there are no signals."""
        return 0

    def decode(self, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Make the shifts that earlier edits recorded, and then decode as `Decoder.decode` does."""
        # Edits only record shifts. llama.cpp gets the shifts here, because it rotates the shifted keys only
        # when it decodes. If an edit passed its shifts to llama.cpp at once, and the cache was saved before
        # the next decode, the saved keys would not be rotated yet
        for shift in shifts(self._at, self._pos_of):
            self.shift(*shift)
        super().decode(tokens, pos_0, n_output)
        new = np.arange(pos_0, pos_0 + len(tokens), dtype=np.int32)
        self._at = self._pos_of = np.concatenate([self._pos_of, new])

    def apply(
        self, moves: np.ndarray, n_keep: int, pos_0: int, merge: Merge | None = None, **how: object
    ) -> None:
        """Edit the cache as `Context.apply` does. Cells that only move within the table cost nothing.

        how: the other arguments of `Context.apply`. Raises LibraryError for a merge, and for hidden cells.
        """
        if merge is not None or how.get("n_hidden"):
            action = "hiding cells" if merge is None else "merging values"
            raise LibraryError(f"{UNPATCHED}, which {action} needs; {HOW_TO_BUILD}")
        if not n_keep:
            # some models can only remove all tokens
            self.clear()
            self._at = self._pos_of = np.empty(0, np.int32)
            return
        _, dst, src, delta = np.reshape(moves, (-1, 4)).T
        source, turn = np.arange(n_keep), np.zeros(n_keep, np.int32)
        source[dst], turn[dst] = src, delta
        for run in runs(self._at, np.delete(np.arange(len(self._at)), source)):
            self.remove(*run)
        self._pos_of = self._pos_of[source] + turn
        self._at = self._at[source]

    def mark_drafts(self, n: int) -> None:
        """Do nothing: there are no signals and no archive."""

    def drop(self, n: int) -> None:
        """Remove the last n tokens of the last decode. Raises LibraryError if there are recurrent layers."""
        self.remove(int(self._at[-n]), int(self._at[-1]) + 1)
        self._at, self._pos_of = self._at[:-n], self._pos_of[:-n]

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise LibraryError, in place of a method that needs the patch.

        The engine refuses policies that need such a method.
        """
        raise LibraryError(f"{UNPATCHED}, which this step needs; {HOW_TO_BUILD}")

    see = read = history = history_shape = write = read_keys = hide = resize = read_value_norms = _refuse

    def cell_bytes(self, layer: int) -> int:
        """Return the size of a cell's K and V in all layers, in bytes."""
        return self._cell_bytes

    def cells(self, layer: int, n: int) -> np.ndarray:
        """Return u1[bytes]: the cells' positions now, their positions at the next decode, and their state."""
        table = np.stack([self._at, self._pos_of]).astype("<i4")
        return np.frombuffer(table.tobytes() + self.state(), np.uint8)

    def fits(self, layer: int, n: int, data: np.ndarray) -> bool:
        """True if the data is long enough for n cells. llama.cpp checks the rest in `set_state`."""
        return data.dtype == np.uint8 and data.nbytes > 8 * n

    def set_cells(self, layer: int, n: int, data: np.ndarray) -> None:
        """Fill an empty cache with the data that `cells` returned."""
        table = np.frombuffer(data[: 8 * n].tobytes(), "<i4").reshape(2, n)
        self.set_state(data[8 * n :].tobytes())
        self._at, self._pos_of = table.astype(np.int32)

    def set_places(self, rot: np.ndarray) -> None:
        """Do nothing: a token has one position in all rows."""

    def clear_signals(self) -> None:
        """Do nothing: there are no signals."""


AnyContext: TypeAlias = Context | SequenceContext
"""Context of an engine, with a patched or an unpatched llama.cpp."""


def runs(at: np.ndarray, gone: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, end) of positions that hold only removed cells.

    at i32[cell]: position of each cell. gone i64[n]: the removed cells.
    """
    if not len(gone):
        return
    order = np.argsort(at)
    is_gone = np.zeros(len(at) + 2, np.int8)
    is_gone[1 + np.flatnonzero(np.isin(order, gone))] = 1
    edges = np.diff(is_gone)
    for first, end in zip(np.flatnonzero(edges > 0), np.flatnonzero(edges < 0), strict=True):
        yield int(at[order[first]]), int(at[order[end - 1]]) + 1


def shifts(at: np.ndarray, to: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield shifts (first, end, delta), which move cells from positions `at` to positions `to`.

    at, to: i32[cell]. Both must give the same order of cells. A shift adds delta to the positions
    first .. end - 1. If the shifts are applied in the order in which they are yielded, no token moves twice.
    """
    order = np.argsort(at)
    at, delta = at[order], (to - at)[order]
    starts = np.flatnonzero(np.diff(delta, prepend=0))
    ends = np.append(starts, len(delta))[1:]
    groups = [(int(at[i]), int(at[j - 1]) + 1, int(delta[i])) for i, j in zip(starts, ends, strict=True)]
    # Yield upward shifts from the highest group down, and downward shifts from the lowest group up. Then no
    # group of cells overwrites another group
    yield from (group for group in reversed(groups) if group[2] > 0)
    yield from (group for group in groups if group[2] < 0)
