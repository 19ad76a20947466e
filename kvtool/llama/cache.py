"""What the engine asks of a cache, whichever llama.cpp is behind it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kvtool.llama.archive import Archive
from kvtool.policy import Merge, Signal


class Cache(Protocol):
    """One sequence in llama.cpp: cells with keys and values, the decode that fills them, edits and copies.

    `Context` has all of it, from the patched library. `SequenceContext` does what an unpatched one can: to it
    all rows are one, and it raises LibraryError for the rest.

    Attributes
    ----------
    handle
        llama.cpp's own context, for its own functions.
    n_row
        Rows that are evicted on their own.
    n_dim
        The length of a key; the longest if layers differ.
    n_beside
        Entries of the table that `beside` returns; 0 for a model whose layers all have rows.
    n_cell
        Cells of the longest layer.
    row_layers
        i32[row]: the layer of each row, counted among all layers of the model.
    n_head
        i32[row]: the query heads that share each row's KV head.
    layer_cells
        i32[layer]: the cells of each layer that has rows.
    cache_bytes
        Bytes of the K and V tensors, those of sliding layers included.
    archive
        What has left the cache and may be recalled; None without recall.
    has_logits
        Whether the last decode left logits to sample from.
    """

    @property
    def handle(self) -> object: ...
    @property
    def n_row(self) -> int: ...
    @property
    def n_dim(self) -> int: ...
    @property
    def n_beside(self) -> int: ...
    @property
    def n_cell(self) -> int: ...
    @property
    def row_layers(self) -> np.ndarray: ...
    @property
    def n_head(self) -> np.ndarray: ...
    @property
    def layer_cells(self) -> np.ndarray: ...
    @property
    def cache_bytes(self) -> int: ...
    @property
    def archive(self) -> Archive | None: ...
    @property
    def has_logits(self) -> bool: ...

    def close(self) -> None:
        """Frees the cache. A second call does nothing."""

    def see(self, n_seen: int) -> None:
        """The first query of the next decode has seen n_seen tokens before: what 1 / t and log t count."""

    def decode(self, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Decodes i32[n] tokens at positions pos_0, pos_0 + 1, ...; the last n_output give logits."""

    def logits(self) -> np.ndarray:
        """f32[n_output, n_vocab] of the last decode: a view that the next decode overwrites."""

    def read(self, signal: Signal, n_kv: int) -> np.ndarray:
        """f32[row, n_kv]: one signal of the queries since the last edit; RECENT of its last queries.

        IMPORTANT is how many queries ago a key was last important: 1 is the last query; 0: to none.
        """

    def history(self, signal: Signal, n_kv: int) -> np.ndarray:
        """What `write` continues a signal from: `read`, or for RECENT f32[query, row, n_kv], oldest first."""

    def history_shape(self, signal: Signal, n_kv: int) -> tuple[int, ...]:
        """The shape of what `history` returns."""

    def write(self, signal: Signal, values: np.ndarray) -> None:
        """Continues a signal from its `history`."""

    def read_keys(self, first: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """f32[row, n, n_dim]: the keys of cells first i32[row] .. of each row, rotated by delta i32[row, n].

        A quantized K is stored under one orthogonal map of llama.cpp's; its keys come under that map.
        """

    def apply(
        self,
        moves: np.ndarray,
        n_keep: int,
        pos_0: int,
        merge: Merge | None = None,
        *,
        n_keep_row: np.ndarray | None = None,
    ) -> None:
        """Edits the cache and clears the signals: merges first, then moves; cells 0 .. n_keep - 1 stay live.

        Parameters
        ----------
        moves
            i32[n, 4]: (row, dst, src, delta). Cell dst takes what cell src holds, its key rotated by delta.
        n_keep, pos_0
            The last live cell counts as position pos_0 + n_keep - 1, the others come before it, and the next
            token must come at pos_0 + n_keep. Where that is another position than it was, sliding layers
            move along; what would come before position 0 they lose.
        merge
            New values for cells that stay.
        n_keep_row
            i32[row]: n_keep of each row, at most n_keep, if rows are ragged.

        Raises
        ------
        LibraryError
            For an index or a pair of moves that cannot be. The cache is then unchanged.
        """

    def hide(self, n: int) -> None:
        """Keeps the first n cells out of sight of later queries, and clears the signals.

        The next token may have any position. Sliding layers forget everything.
        """

    def resize(self, n_cell: np.ndarray) -> None:
        """Gives each layer i32[layer] that many cells. The live ones keep what they hold."""

    def cell_bytes(self, layer: int) -> int:
        """Bytes of K and V that one cell takes in a layer."""

    def cells(self, layer: int, n: int) -> np.ndarray:
        """u1[bytes]: the first n cells of a layer, as they are stored."""

    def fits(self, layer: int, n: int, data: np.ndarray) -> bool:
        """Whether `cells` may have returned this for n cells of the layer."""

    def set_cells(self, layer: int, n: int, data: np.ndarray) -> None:
        """Writes what `cells` returned."""

    def set_places(self, rot: np.ndarray) -> None:
        """Says where the keys i32[row, n] of each row's first cells stand: with ALiBi they do not."""

    def beside(self) -> tuple[np.ndarray, np.ndarray]:
        """What sliding and recurrent layers hold: a table i32[n_beside], where it belongs; u1[bytes]."""

    def set_beside(self, table: np.ndarray, data: np.ndarray) -> None:
        """Writes what `beside` returned."""

    @property
    def beside_shapes(self) -> list[tuple[int]]:
        """The shapes of the two arrays that `beside` returns."""
