"""A cache under llama.cpp's own sequence calls: what an unpatched library can do for a policy.

They remove and shift whole tokens, in all layers and heads alike: to a policy the cache is one row.
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

    llama.cpp finds a cell by its position. Cell i is therefore the ith of a table kept here.

    Parameters
    ----------
    how
        As in `Decoder`.
    """

    n_row = 1
    # no policy that reads keys runs here
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
        # each cell's position in llama.cpp now, and the one it must have at the next decode
        self._at = self._pos_of = np.empty(0, np.int32)

    def signal_bytes(self, _n_cell: np.ndarray) -> int:
        """None: no policy that reads signals runs here."""
        return 0

    def decode(self, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Decodes i32[n] tokens at positions pos_0, pos_0 + 1, ...; the last n_output give logits."""
        # not earlier: llama.cpp saves keys without the rotations that it has put off
        for shift in shifts(self._at, self._pos_of):
            self.shift(*shift)
        super().decode(tokens, pos_0, n_output)
        new = np.arange(pos_0, pos_0 + len(tokens), dtype=np.int32)
        self._at = self._pos_of = np.concatenate([self._pos_of, new])

    def apply(
        self,
        moves: np.ndarray,
        n_keep: int,
        pos_0: int,
        merge: Merge | None = None,
        *,
        n_keep_row: np.ndarray | None = None,
        n_hidden: int = 0,
    ) -> None:
        """Edits the cache, as `Context.apply` says. Cells that only move within the table cost nothing.

        Raises LibraryError for a merge, and for hidden cells.
        """
        for is_asked, what in ((merge is not None, "merging values"), (n_hidden, "hiding cells")):
            if is_asked:
                raise LibraryError(f"{UNPATCHED}, which {what} needs; {HOW_TO_BUILD}")
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
        """Remove the last n tokens of the last decode. Raises LibraryError if layers are recurrent."""
        self.remove(int(self._at[-n]), int(self._at[-1]) + 1)
        self._at, self._pos_of = self._at[:-n], self._pos_of[:-n]

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        """What an unpatched llama.cpp cannot do. The engine refuses such a policy before it comes to this."""
        raise LibraryError(f"{UNPATCHED}, which this step needs; {HOW_TO_BUILD}")

    see = read = history = history_shape = write = read_keys = hide = resize = read_value_norms = _refuse

    def cell_bytes(self, layer: int) -> int:
        """Bytes of K and V that one cell takes in all layers."""
        return self._cell_bytes

    def cells(self, layer: int, n: int) -> np.ndarray:
        """u1[bytes]: both positions of each of the n cells, and the sequence as llama.cpp saves it."""
        table = np.stack([self._at, self._pos_of]).astype("<i4")
        return np.frombuffer(table.tobytes() + self.state(), np.uint8)

    def fits(self, layer: int, n: int, data: np.ndarray) -> bool:
        """Whether `cells` may have returned this for n cells; llama.cpp checks the rest."""
        return data.dtype == np.uint8 and data.nbytes > 8 * n

    def set_cells(self, layer: int, n: int, data: np.ndarray) -> None:
        """Writes what `cells` returned into an empty cache."""
        table = np.frombuffer(data[: 8 * n].tobytes(), "<i4").reshape(2, n)
        self.set_state(data[8 * n :].tobytes())
        self._at, self._pos_of = table.astype(np.int32)

    def set_places(self, rot: np.ndarray) -> None:
        """Nothing: llama.cpp has one place for a token in all rows."""

    def clear_signals(self) -> None:
        """Nothing: there are none."""


Cache: TypeAlias = Context | SequenceContext
"""What an engine runs on, whichever llama.cpp there is."""


def runs(at: np.ndarray, gone: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges (first, end) of positions that hold cells gone i64[n], of those at i32[cell], and no other."""
    if not len(gone):
        return
    order = np.argsort(at)
    is_gone = np.zeros(len(at) + 2, np.int8)
    is_gone[1 + np.flatnonzero(np.isin(order, gone))] = 1
    edges = np.diff(is_gone)
    for first, end in zip(np.flatnonzero(edges > 0), np.flatnonzero(edges < 0), strict=True):
        yield int(at[order[first]]), int(at[order[end - 1]]) + 1


def shifts(at: np.ndarray, to: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """The shifts (first, end, delta) that bring cells at i32[cell] to positions i32[cell], in the same order.

    Done one after the other, none touches a token that another has moved.
    """
    order = np.argsort(at)
    at, delta = at[order], (to - at)[order]
    starts = np.flatnonzero(np.diff(delta, prepend=0))
    ends = np.append(starts, len(delta))[1:]
    groups = [(int(at[i]), int(at[j - 1]) + 1, int(delta[i])) for i, j in zip(starts, ends, strict=True)]
    # groups that move up go from the top, groups that move down from the bottom: none overwrites another
    yield from (group for group in reversed(groups) if group[2] > 0)
    yield from (group for group in groups if group[2] < 0)
