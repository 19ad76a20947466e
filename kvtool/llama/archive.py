"""The archive: keys and values that have left the cache, which later steps recall from."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kvtool.errors import UsageError
from kvtool.llama.decoder import Decoder
from kvtool.llama.library import check, error_text, lib
from kvtool.llama.segment import (
    CLUSTERS,
    N_CLUSTERS,
    TABLE,
    Clusters,
    Segment,
    clusters_name,
    layer_name,
    listed,
    listed_clusters,
    pieces,
)
from kvtool.system.files import free_disk_bytes
from kvtool.system.memory import free_bytes

_N_FIXED = 3
_LARGEST = 2**31 - 1


class Archive:
    """The archive of a patched llama.cpp's context: tokens by their positions in the stream, without gaps.

    It takes memory in slabs: slab i has room for tokens i * n .. (i + 1) * n - 1 of the stream in all layers.
    They are in this process's memory, or in a file that has no name: its space is free again when the process
    ends.

    Parameters
    ----------
    owner
        The cache: its handle is llama.cpp's own context.
    n_layer
        Layers that have rows.
    n_max, max_bytes
        The most tokens, or the most bytes that they take; a quarter of the free memory, or half of
        the disk's free space, if neither is given.
    file
        Where to make the file; the archive is in memory if not given.

    Attributes
    ----------
    file
        Where the file was made, or None.
    n_max
        The most tokens, which are never in more slabs than max_bytes has.
    n_token, slab_bytes
        Tokens and bytes of a slab. Its tokens are a block, which has clusters of its own.
    segments
        What has been saved of this stream, oldest first and without gaps. Tokens behind it have not been.
    clusters
        The clusters that have been saved of it.
    is_traced
        Whether `attended` follows what rows attend to.
    while_sealing
        Told while `restore` makes clusters: of how many rows it has, and how many rows there are.

    Raises
    ------
    UsageError
        For bytes that hold less than two slabs, and for a file that cannot be made.
    """

    def __init__(
        self,
        owner: Decoder,
        n_layer: int,
        n_max: int | None = None,
        max_bytes: int | None = None,
        file: str | None = None,
    ) -> None:
        self._owner = owner
        self._n_layer = n_layer
        self.file = file
        n_token = ctypes.c_int32()
        self.slab_bytes: int = lib.llama_kvtool_archive_slab(owner.handle, ctypes.byref(n_token))
        check(self.slab_bytes)
        self.n_token = n_token.value
        if max_bytes is not None and max_bytes < 2 * self.slab_bytes:
            # rounded up: typed again, it must be enough
            least = f"{-(-2 * self.slab_bytes // 1024)}KiB"
            raise UsageError(
                f"--archive must be at least {least}: memory is taken for {self.n_token} tokens at a time, "
                "and that twice at least"
            )
        self.segments: list[Segment] = []
        self.clusters: list[Clusters] = []
        self.is_traced = False
        self.while_sealing: Callable[[int, int], None] = lambda done, n: None
        if file is not None and lib.llama_kvtool_archive_file(owner.handle, os.fsencode(file)) < 0:
            raise UsageError(f"cannot make the archive's file {file}: {error_text()}")
        if n_max is None:
            if max_bytes is None:
                max_bytes = free_bytes() // 4 if file is None else free_disk_bytes(file) // 2
            n_max = self._tokens_in(max_bytes // self.slab_bytes)
        self.n_max = min(n_max, _LARGEST)

    def _tokens_in(self, n_slab: int) -> int:
        """The most tokens that never take more slabs, wherever in one the first of them is."""
        return max(n_slab - 1, 0) * self.n_token + 1

    @property
    def max_bytes(self) -> int:
        """The most bytes that n_max tokens can take."""
        return -(-(self.n_max + self.n_token - 1) // self.n_token) * self.slab_bytes

    def share(self, n: int) -> int:
        """Takes no more than the n-th part of its bytes from now on: the rest is for others.

        Returns n, or how many parts there are at most: each has two slabs at least.
        """
        n_slab = self.max_bytes // self.slab_bytes
        if (n := min(n, max(n_slab // 2, 1))) > 1:
            self.n_max = min(self.n_max, self._tokens_in(n_slab // n))
        return n

    def push(self, cells: np.ndarray, pos_0: int) -> None:
        """Copies these cells i32[n] of all rows: the tokens at pos_0, pos_0 + 1, ..., which come next.

        The oldest go for good where there are more than n_max. Raises StreamEnd where there is no room for
        them, and the archive is as it was.
        """
        cells = np.ascontiguousarray(cells, np.int32)
        check(lib.llama_kvtool_archive(self._owner.handle, cells.ctypes.data, len(cells), pos_0, self.n_max))

    def rebase(self, base: int) -> None:
        """From now on, keys in the cache are rotated to their position in the stream less base."""
        check(lib.llama_kvtool_base(self._owner.handle, base))

    def keep(self, n: int) -> None:
        """Forgets all but the newest n tokens; without any, another stream may begin."""
        if not n:
            self.segments, self.clusters = [], []
        check(lib.llama_kvtool_forget(self._owner.handle, n))

    def stage(self, n: int) -> int:
        """Let steps attend to all archived tokens, at most n, on the device of each layer; 0 ends this.

        Returns the bytes that this takes there. Raises LibraryError where a device lacks memory, or a model
        cannot.
        """
        n_bytes: int = lib.llama_kvtool_stage(self._owner.handle, n)
        check(n_bytes)
        return n_bytes

    def go_back(self, cell: int, n: int, end: int, base: int, next_pos: int) -> None:
        """Forgets the tokens from `end` on; the newest n of the others leave it for cells of the cache.

        Parameters
        ----------
        cell
            The first of these cells, the oldest token's.
        base
            From now on, keys in the cache are rotated to their position less this. Those that come back are.
        next_pos
            The position that came next when what stays had just been archived.
        """
        check(lib.llama_kvtool_go_back(self._owner.handle, cell, n, end, base, next_pos))
        self.segments = [each for each in self.segments if each.end <= end - n]
        self.clusters = [each for each in self.clusters if each.end <= end - n]

    @property
    def frames(self) -> list[tuple[int, int]]:
        """Stretches of the stream whose keys have one base: where each begins, and its base."""
        return [(first, base) for first, base in self._table()[_N_FIXED:].reshape(-1, 2).tolist()]

    @property
    def n(self) -> int:
        """Tokens in it."""
        return len(self.span)

    @property
    def span(self) -> range:
        """The positions of its tokens."""
        return range(*self._table()[:2].tolist())

    @property
    def end(self) -> int:
        """The position of the token that comes next, if there are some."""
        return int(self._table()[1])

    def trace(self, n: int) -> None:
        """From now on `attended` has the n tokens of each row that get most attention; 0: it has none.

        Steps take a little longer then. Rows without made cells always have those that come back.
        """
        check(lib.llama_kvtool_trace(self._owner.handle, n))
        self.is_traced = n > 0

    def attended(self, n_row: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """The archived tokens that each row attended to most in the last step, and how much.

        n: as traced, or without made cells the most that come back. Returns i64[n_row, n], the oldest first,
        then -1; and f32[n_row, n], the sum of the attention of the row's query heads and the step's tokens.
        """
        found, attn = np.empty((n_row, n), np.int64), np.empty((n_row, n), np.float32)
        check(lib.llama_kvtool_attended(self._owner.handle, found.ctypes.data, attn.ctypes.data, n_row, n))
        return found, attn

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes now."""
        return int(lib.llama_kvtool_archive_bytes(self._owner.handle))

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes of a token's keys and values in each layer."""
        return [self._layer_bytes(layer, 0, 1) for layer in range(self._n_layer)]

    def read(self, begin: int, end: int) -> np.ndarray:
        """u8[]: keys and values of these tokens as they are stored, layer by layer, then token by token."""
        data = np.empty((end - begin) * sum(self.layer_bytes), np.uint8)
        at = 0
        for layer in range(self._n_layer):
            check(lib.llama_kvtool_get_archive(self._owner.handle, layer, data[at:].ctypes.data, begin, end))
            at += self._layer_bytes(layer, begin, end)
        return data

    def save(self, *, tokens: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """What `restore` takes: arrays by name, one at a time. tokens: False leaves all but the table out."""
        table = self._table()
        begin, end = table[:2].tolist()
        yield TABLE, table
        for layer in range(self._n_layer if tokens else 0):
            data = np.empty(self._layer_bytes(layer, begin, end), np.uint8)
            check(lib.llama_kvtool_get_archive(self._owner.handle, layer, data.ctypes.data, begin, end))
            yield layer_name(layer), data
        if tokens:
            yield from self.save_clusters()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's clusters; 0 where the archive has none."""
        n_bytes: int = lib.llama_kvtool_clusters(self._owner.handle, None)
        check(n_bytes)
        return n_bytes

    @property
    def clustered(self) -> list[tuple[int, bool]]:
        """Blocks that have clusters, alike in all rows: where each begins, and whether these are far ones."""
        span = np.empty(4, np.int64)
        check(lib.llama_kvtool_clusters(self._owner.handle, span.ctypes.data))
        begin, far, near, end = span.tolist()
        blocks = range(begin, end, self.n_token)
        return [(at, at < far) for at in blocks if not far <= at < near]

    def read_clusters(self, begin: int, end: int, is_far: bool) -> np.ndarray:
        """u8[]: which clusters the tokens of these blocks are in, block by block."""
        data = np.empty((end - begin) // self.n_token * self.block_bytes, np.uint8)
        check(lib.llama_kvtool_get_clusters(self._owner.handle, data.ctypes.data, begin, end, is_far))
        return data

    def save_clusters(self) -> Iterator[tuple[str, np.ndarray]]:
        """What `save` gives of clusters; nothing where there are none."""
        table, found = [], []
        for is_far in (True, False):
            if blocks := [at for at, far in self.clustered if far == is_far]:
                begin, end = blocks[0], blocks[-1] + self.n_token
                found.append(self.read_clusters(begin, end, is_far))
                table.append((begin, end, is_far, found[-1].nbytes, 0))
        if table:
            yield CLUSTERS, np.array(table, np.int64)
        yield from ((clusters_name(i), data) for i, data in enumerate(found))

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Continues from what `save` gave: from the newest n_max tokens of it.

        Raises LibraryError if llama.cpp refuses it, and StreamEnd where there is no room for it.
        """
        table = np.array(saved[TABLE], np.int64)
        begin, end = table[:2].tolist()
        table[0] = first = max(begin, end - self.n_max)
        for layer, n_bytes in enumerate(self.layer_bytes):
            there = [
                (max(at, first), np.ascontiguousarray(data[max(first - at, 0) * n_bytes :]))
                for at, data in pieces(saved, layer)
            ]
            check(set_layer(self._owner.handle, layer, there, first, end))
        self._restore_clusters(saved, first // self.n_token * self.n_token)
        check(lib.llama_kvtool_set_archive_table(self._owner.handle, table.ctypes.data, len(table)))
        while (n_left := lib.llama_kvtool_seal(self._owner.handle, max(self.n_max, 1))) > 0:
            # a byte has two tokens
            n_row = self.block_bytes * 2 // self.n_token
            self.while_sealing(n_row - n_left, n_row)
        check(n_left)
        self.segments, self.clusters = list(listed(saved)), list(listed_clusters(saved))

    def _restore_clusters(self, saved: Mapping[str, np.ndarray], begin: int) -> None:
        """Hands over the clusters of the blocks from this one on."""
        n_bytes = self.block_bytes
        table = saved[CLUSTERS].tolist() if n_bytes and CLUSTERS in saved else ()
        for i, (own, end, is_far, *_) in enumerate(table):
            first = max(own, begin)
            if first < end:
                n_left_out = (first - own) // self.n_token
                data = np.ascontiguousarray(saved[clusters_name(i)])[n_left_out * n_bytes :]
                handle, pointer = self._owner.handle, data.ctypes.data
                check(lib.llama_kvtool_set_clusters(handle, pointer, first, end, bool(is_far)))

    @staticmethod
    def n_saved(saved: Mapping[str, np.ndarray]) -> int:
        """Tokens in the arrays of `save`; 0 for arrays that are not from there."""
        table = _table_of(saved)
        return 0 if table is None else int(table[1] - table[0])

    def fits(self, saved: Mapping[str, np.ndarray], n_past: int) -> bool:
        """Whether `save` may have given this after n_past tokens of a stream."""
        table = _table_of(saved)
        if table is None or len(table) % 2 == 0:
            return False
        begin, end, far = table[:_N_FIXED].tolist()
        first, base = table[_N_FIXED::2], table[_N_FIXED + 1 :: 2]
        if not 0 <= begin <= end <= n_past or not 0 <= far <= end:
            return False
        if (end > begin and (not len(first) or first[0] > begin)) or (np.diff(first) <= 0).any():
            return False
        if any(((values < 0) | (values > n_past)).any() for values in (first, base)) or (first > end).any():
            return False
        return _fit_clusters(saved, end, self.n_token, self.block_bytes) and all(
            all(data.dtype == np.uint8 for _, data in parts)
            and sum(data.nbytes for _, data in parts) == (end - begin) * n_bytes
            for n_bytes, parts in ((n, pieces(saved, layer)) for layer, n in enumerate(self.layer_bytes))
        )

    def _table(self) -> np.ndarray:
        n: int = lib.llama_kvtool_get_archive_table(self._owner.handle, None, 0)
        check(n)
        table = np.empty(n, np.int64)
        check(lib.llama_kvtool_get_archive_table(self._owner.handle, table.ctypes.data, len(table)))
        return table

    def _layer_bytes(self, layer: int, begin: int, end: int) -> int:
        n_bytes: int = lib.llama_kvtool_set_archive(self._owner.handle, layer, None, None, 0, begin, end)
        check(n_bytes)
        return n_bytes


def set_layer(handle: object, layer: int, parts: list[tuple[int, np.ndarray]], begin: int, end: int) -> int:
    """Makes tokens begin .. end - 1 all that a layer of an archive has, from `segment.pieces` of them.

    Returns their bytes, or a number below 0 for `check`.
    """
    # of several that begin at one token all but the last are empty; without any, one is
    at = np.array([at for at, _ in parts] or [begin], np.int64)
    data = np.array([data.ctypes.data for _, data in parts] or [at.ctypes.data], np.uintp)
    n_bytes: int = lib.llama_kvtool_set_archive(
        handle, layer, data.ctypes.data, at.ctypes.data, len(at), begin, end
    )
    return n_bytes


def _fit_clusters(saved: Mapping[str, np.ndarray], end: int, n_token: int, n_bytes: int) -> bool:
    """Whether the clusters that are listed may be of tokens before `end`.

    n_token, n_bytes: of a block; no bytes where there are no clusters.
    """
    if CLUSTERS not in saved or not n_bytes:
        return True
    table = saved[CLUSTERS]
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != N_CLUSTERS:
        return False
    return all(
        first % n_token == last % n_token == 0
        and 0 <= first < last <= end
        and (data := saved.get(clusters_name(i))) is not None
        and data.dtype == np.uint8
        and data.nbytes == (last - first) // n_token * n_bytes
        for i, (first, last, *_) in enumerate(table.tolist())
    )


def _table_of(saved: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """The table in the arrays of `save`; None for arrays that are not from there."""
    table = saved.get(TABLE)
    fits = table is not None and table.dtype == np.int64 and table.ndim == 1 and len(table) >= _N_FIXED
    return table if fits else None
