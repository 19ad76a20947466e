"""The archive: keys and values of evicted tokens, from which later steps recall."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from kvtool.errors import UsageError
from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.cache.segment import (
    CENTERS,
    CLUSTERS,
    TABLE,
    Clusters,
    Segment,
    clusters_name,
    layer_name,
    listed,
    n_blocks,
    pieces,
)
from kvtool.llama.libllama.library import check, error_text, lib
from kvtool.system.files import free_disk_bytes
from kvtool.system.memory import free_bytes

_N_FIXED = 3
_LARGEST = 2**31 - 1


class ArchiveSettings(NamedTuple):
    """How a context archives tokens.

    Attributes
    ----------
    type, n_max, max_bytes, file
        The values of `archive_type`, `archive`, `archive_bytes` and `archive_file` in `Settings`.
    n_near
        Distance limit in tokens. Archived tokens that are farther away are chosen and attended to as if they
        were at this distance.
    """

    type: str = "f16"
    n_near: int = 0
    n_max: int | None = None
    max_bytes: int | None = None
    file: str | None = None


class Archive:
    """Archive of a context of the patched llama.cpp. It holds a contiguous range of the stream's tokens.

    It allocates memory in slabs. Slab i holds tokens i * n_block .. (i + 1) * n_block - 1 in all layers.
    Slabs are in this process's memory or in an unnamed file, whose space is freed when the process ends.

    n_layer: number of layers that have rows. Raises UsageError if the bytes, given or default, hold less than
    two slabs, or the file cannot be created.

    Attributes
    ----------
    n_max
        Maximum tokens. Their slabs never take more than max_bytes.
    n_block
        Number of tokens in a slab. These tokens form a block, and each block is clustered separately.
    segments
        Saved segments of this stream, oldest first and without gaps. Later tokens are not saved yet.
    is_traced
        True if llama.cpp records the attention that `attended` returns.
    while_sealing
        Function (number of finished rows, number of rows) that `restore` calls while it computes clusters.
    """

    def __init__(self, owner: Decoder, n_layer: int, settings: ArchiveSettings) -> None:
        self._owner = owner
        self._n_layer = n_layer
        self.file = file = settings.file
        n_max, max_bytes = settings.n_max, settings.max_bytes
        n_block = ctypes.c_int32()
        self.slab_bytes: int = lib.llama_kvtool_archive_slab(owner.handle, ctypes.byref(n_block))
        check(self.slab_bytes)
        self.n_block = n_block.value
        if file is not None and lib.llama_kvtool_archive_file(owner.handle, os.fsencode(file)) < 0:
            raise UsageError(f"cannot make the archive's file {file}: {error_text()}")
        fault, remedy = "--archive is too small", ""
        if n_max is None and max_bytes is None:
            if file is None:
                max_bytes = free_bytes() // 4
                fault = "a quarter of the free memory is too small for the archive"
                remedy = "; free some memory, or choose a file with --archive-file"
            else:
                max_bytes = free_disk_bytes(file) // 2
                fault = f"half of the free space on the disk of {file} is too small for the archive"
                remedy = "; free some space, or choose a file on another disk"
        if max_bytes is not None and max_bytes < 2 * self.slab_bytes:
            # the message prints this size, so round up: an archive of the printed size must be accepted
            least = f"{-(-2 * self.slab_bytes // 1024)} KiB"
            raise UsageError(
                f"{fault}: the archive grows in steps of {self.n_block} tokens and needs at least two steps "
                f"({least}){remedy}"
            )
        self.segments: list[Segment] = []
        self.clusters: list[Clusters] = []
        self.is_traced = False
        self.while_sealing: Callable[[int, int], None] = lambda done, n: None
        if n_max is None:
            assert max_bytes is not None
            n_max = self._tokens_in(max_bytes // self.slab_bytes)
        self.n_max = min(n_max, _LARGEST)

    def _tokens_in(self, n_slab: int) -> int:
        """Return how many tokens fit in n_slab slabs, even if the first token is the last of its slab."""
        return max(n_slab - 1, 0) * self.n_block + 1

    @property
    def max_bytes(self) -> int:
        """Maximum bytes that n_max tokens can take."""
        return self.bytes_of(self.n_max)

    def bytes_of(self, n: int) -> int:
        """Return the maximum bytes that n tokens can take."""
        return -(-(n + self.n_block - 1) // self.n_block) * self.slab_bytes

    def share(self, n: int) -> int:
        """Divide the bytes into n equal parts, and lower this archive's limit to one part.

        A part has at least two slabs, so there may be fewer than n parts. Returns the number of parts.
        """
        n_slab = self.max_bytes // self.slab_bytes
        if (n := min(n, max(n_slab // 2, 1))) > 1:
            self.n_max = min(self.n_max, self._tokens_in(n_slab // n))
        return n

    def push(self, cells: np.ndarray, pos_0: int) -> None:
        """Append the tokens in cells i32[n] of all rows. Their positions are pos_0, pos_0 + 1, ...

        If there are then more than n_max tokens, the oldest are deleted. Raises StreamEnd if memory or disk
        is full; the archive is then unchanged.
        """
        cells = np.ascontiguousarray(cells, np.int32)
        check(lib.llama_kvtool_archive(self._owner.handle, cells.ctypes.data, len(cells), pos_0, self.n_max))

    def rebase(self, base: int) -> None:
        """Set the base: from now on, keys in the cache are rotated to their stream position minus base."""
        check(lib.llama_kvtool_base(self._owner.handle, base))

    def forget(self) -> None:
        """Delete all tokens. Another stream may then begin."""
        self.segments, self.clusters = [], []
        check(lib.llama_kvtool_forget(self._owner.handle))

    def stage(self, n: int) -> None:
        """Let later steps attend to all archived tokens, which are at most n, on the device of each layer.

        While a step is computed, the tokens are copied to the devices layer by layer, through two buffers.
        n = 0 ends this. Raises LibraryError if a device lacks memory or if the model does not support such
        steps.
        """
        check(lib.llama_kvtool_stage(self._owner.handle, n))

    @property
    def stage_bytes(self) -> int:
        """Bytes that each archived token takes in each of the two buffers of `stage`."""
        n_bytes: int = lib.llama_kvtool_stage_bytes(self._owner.handle)
        check(n_bytes)
        return n_bytes

    def reside(self, n_mean: int, n_mean_set: int, n_token: int) -> None:
        """Let each step of one token and its draft tokens attend to residents, and not search the archive.

        Residents are cells on the device that hold means of clusters, and some archived tokens. Without
        residents, a step searches the archive on the host, and writes the results to synthetic cells (see
        docs/recall.md).

        Parameters
        ----------
        n_mean
            Number of cells of each row for means of clusters, a multiple of 16. If n_mean_set is 0, all
            clusters need a cell. If there are too few cells, steps search the archive again.
        n_mean_set
            Number of cells of each row for means of sets of 16 clusters, a multiple of 16. If it is not 0,
            all sets need a cell. Only the best sets then have cells for the means of their clusters.
        n_token
            Number of archived tokens that are resident in each row; 0 ends the use of residents.

        Raises LibraryError if the model, its cache or the policy does not support it, and StreamEnd if a
        device lacks memory.
        """
        check(lib.llama_kvtool_reside(self._owner.handle, n_mean, n_mean_set, n_token))

    def resident_bytes(self, n_mean: int, n_mean_set: int, n_token: int) -> int:
        """Return the size in bytes of the cells that `reside` would add.

        Raises LibraryError as `reside` does.
        """
        n_bytes: int = lib.llama_kvtool_resident_bytes(self._owner.handle, n_mean, n_mean_set, n_token)
        check(n_bytes)
        return n_bytes

    def missed(self) -> float:
        """Choose the residents of the next step, and return the share of attention that the last step missed.

        The queries of the last step determine the residents. If a cluster is chosen now but was not resident
        in the last step, that step missed the attention to this cluster, except the part that the cluster's
        mean represents. The share is the mean over all query heads of all layers. If the last step had
        several tokens, the largest share of a token is returned. The share is 0 if the last step had no
        residents.

        The share is a little too large, because the softmax leaves out tokens without a cluster, and some
        tokens that were decoded since the last edit of the cache.
        """
        share: float = lib.llama_kvtool_missed(self._owner.handle)
        check(int(share))
        return share

    def rewind(self, cell: int, n: int, end: int, base: int, next_pos: int) -> None:
        """Delete the tokens from position `end` on. Move the newest n remaining tokens back to the cache.

        Parameters
        ----------
        cell
            Index of the cell that gets the oldest of the n tokens. The newer tokens get the next cells.
        base
            From now on, keys in the cache, including the moved keys, are rotated to their position minus
            base.
        next_pos
            Position of the stream's next token when the newest remaining token was archived. Tokens that are
            more than n_near positions before it count as far (see `Clusters`).
        """
        check(lib.llama_kvtool_rewind(self._owner.handle, cell, n, end, base, next_pos))
        self.segments = [segment for segment in self.segments if segment.end <= end - n]
        self.clusters = [clusters for clusters in self.clusters if clusters.end <= end - n]

    @property
    def frames(self) -> list[tuple[int, int]]:
        """(first position, base) of each run of tokens whose keys have the same base. See `rebase`."""
        return [(first, base) for first, base in self._table()[_N_FIXED:].reshape(-1, 2).tolist()]

    @property
    def n(self) -> int:
        """Number of archived tokens."""
        return len(self.span)

    @property
    def span(self) -> range:
        """Positions of the archived tokens."""
        return range(*self._table()[:2].tolist())

    @property
    def end(self) -> int:
        """Position after the newest archived token."""
        return int(self._table()[1])

    def trace(self, n: int) -> None:
        """Let later steps record the n archived tokens of each row that get the most attention.

        `attended` returns these tokens. n = 0 ends this. Recording makes steps a little slower. With MLA,
        steps copy archived tokens back into the cache, and always record the tokens that they copied.
        """
        check(lib.llama_kvtool_trace(self._owner.handle, n))
        self.is_traced = n > 0

    def attended(self, n_row: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the archived tokens that each row attended to most in the last step, and their attention.

        Returns positions i64[n_row, n], oldest first and padded with -1, and attention f32[n_row, n], summed
        over the row's query heads and the step's tokens. n: the number that was given to `trace`; with MLA,
        the maximum number of tokens that a step copies back into the cache.
        """
        pos, attn = np.empty((n_row, n), np.int64), np.empty((n_row, n), np.float32)
        check(lib.llama_kvtool_attended(self._owner.handle, pos.ctypes.data, attn.ctypes.data, n_row, n))
        return pos, attn

    @property
    def n_bytes(self) -> int:
        """Bytes allocated now."""
        return int(lib.llama_kvtool_archive_bytes(self._owner.handle))

    @property
    def layer_bytes(self) -> list[int]:
        """Size of a token's keys and values in each layer, in bytes."""
        return [self._layer_bytes(layer, 0, 1) for layer in range(self._n_layer)]

    @property
    def _center_bytes(self) -> int:
        """Size of a block's centers in bytes; 0 if keys are not centered."""
        n_bytes: int = lib.llama_kvtool_get_centers(self._owner.handle, None, 0, 1)
        check(n_bytes)
        return n_bytes

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the stored keys and values of the tokens at positions begin .. end - 1, as u8[].

        All tokens of the first layer come first, then all tokens of the second layer, and so on.
        """
        data = np.empty((end - begin) * sum(self.layer_bytes), np.uint8)
        at = 0
        for layer in range(self._n_layer):
            check(lib.llama_kvtool_get_archive(self._owner.handle, layer, data[at:].ctypes.data, begin, end))
            at += self._layer_bytes(layer, begin, end)
        return data

    def save(self, *, tokens: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the named arrays that `restore` reads. tokens: False to leave out tokens and clusters."""
        table = self._table()
        begin, end = table[:2].tolist()
        yield TABLE, table
        if n_bytes := self._center_bytes:
            centers = np.empty((n_blocks(begin, end), n_bytes), np.uint8)
            check(lib.llama_kvtool_get_centers(self._owner.handle, centers.ctypes.data, begin, end))
            yield CENTERS, centers
        for layer in range(self._n_layer if tokens else 0):
            data = np.empty(self._layer_bytes(layer, begin, end), np.uint8)
            check(lib.llama_kvtool_get_archive(self._owner.handle, layer, data.ctypes.data, begin, end))
            yield layer_name(layer), data
        if tokens:
            yield from self.save_clusters()

    @property
    def membership_bytes(self) -> int:
        """Size of a block's cluster assignment in bytes; 0 if the archive has no clusters."""
        n_bytes: int = lib.llama_kvtool_clusters(self._owner.handle, None)
        check(n_bytes)
        return n_bytes

    @property
    def clustered(self) -> list[tuple[int, bool]]:
        """(first position, is_far) of each block that is clustered in all rows. is_far: see `Clusters`."""
        span = np.empty(4, np.int64)
        check(lib.llama_kvtool_clusters(self._owner.handle, span.ctypes.data))
        begin, far, near, end = span.tolist()
        blocks = range(begin, end, self.n_block)
        return [(first, first < far) for first in blocks if not far <= first < near]

    def read_clusters(self, begin: int, end: int, is_far: bool) -> np.ndarray:
        """Return the clusters of the blocks at positions begin .. end - 1 as u8[], block by block."""
        data = np.empty((end - begin) // self.n_block * self.membership_bytes, np.uint8)
        check(lib.llama_kvtool_get_clusters(self._owner.handle, data.ctypes.data, begin, end, is_far))
        return data

    def save_clusters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the arrays of `save` that hold clusters, if there are any."""
        table, arrays = [], []
        for is_far in (True, False):
            if blocks := [first for first, far in self.clustered if far == is_far]:
                begin, end = blocks[0], blocks[-1] + self.n_block
                arrays.append(self.read_clusters(begin, end, is_far))
                table.append((begin, end, is_far, arrays[-1].nbytes, 0))
        if table:
            yield CLUSTERS, np.array(table, np.int64)
        yield from ((clusters_name(i), data) for i, data in enumerate(arrays))

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Load the newest n_max tokens of the arrays that `save` yielded.

        Raises LibraryError if llama.cpp refuses them, and StreamEnd if memory or disk is full.
        """
        table = np.array(saved[TABLE], np.int64)
        begin, end = table[:2].tolist()
        table[0] = first = max(begin, end - self.n_max)
        for layer, n_bytes in enumerate(self.layer_bytes):
            parts = [
                (max(pos, first), np.ascontiguousarray(data[max(first - pos, 0) * n_bytes :]))
                for pos, data in pieces(saved, layer)
            ]
            check(set_layer(self._owner.handle, layer, parts, first, end))
        if self._center_bytes:
            centers = np.ascontiguousarray(saved[CENTERS][first // self.n_block - begin // self.n_block :])
            check(lib.llama_kvtool_set_centers(self._owner.handle, centers.ctypes.data, first, end))
        self._restore_clusters(saved, first // self.n_block * self.n_block)
        check(lib.llama_kvtool_set_archive_table(self._owner.handle, table.ctypes.data, len(table)))
        while (n_left := lib.llama_kvtool_seal(self._owner.handle, max(self.n_max, 1))) > 0:
            # a block's clusters take half a byte for each row and token
            n_row = self.membership_bytes * 2 // self.n_block
            self.while_sealing(n_row - n_left, n_row)
        check(n_left)
        self.segments, self.clusters = list(listed(saved, Segment)), list(listed(saved, Clusters))

    def _restore_clusters(self, saved: Mapping[str, np.ndarray], begin: int) -> None:
        """Load the saved clusters of the blocks from position `begin` on."""
        n_bytes = self.membership_bytes
        table = saved[CLUSTERS].tolist() if n_bytes and CLUSTERS in saved else ()
        for i, (saved_begin, end, is_far, *_) in enumerate(table):
            first = max(saved_begin, begin)
            if first < end:
                n_skipped = (first - saved_begin) // self.n_block
                data = np.ascontiguousarray(saved[clusters_name(i)])[n_skipped * n_bytes :]
                handle, pointer = self._owner.handle, data.ctypes.data
                check(lib.llama_kvtool_set_clusters(handle, pointer, first, end, bool(is_far)))

    @staticmethod
    def n_saved(saved: Mapping[str, np.ndarray]) -> int:
        """Return the number of archived tokens in saved arrays; 0 if they do not hold an archive."""
        table = _table_of(saved)
        return 0 if table is None else int(table[1] - table[0])

    def fits(self, saved: Mapping[str, np.ndarray], n_past: int) -> bool:
        """Return True if `save` could have returned these arrays after n_past tokens of a stream."""
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
        if n_center := self._center_bytes:
            centers, shape = saved.get(CENTERS), (n_blocks(begin, end), n_center)
            if centers is None or centers.dtype != np.uint8 or centers.shape != shape:
                return False
        return _fit_clusters(saved, end, self.n_block, self.membership_bytes) and all(
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
    """Replace a layer's archived tokens by the tokens at positions begin .. end - 1.

    parts: the new tokens, in the form that `segment.pieces` returns. Returns the number of bytes, or a
    negative status, for which `check` raises an error.
    """
    # llama.cpp wants at least one part, which may be empty
    pos = np.array([pos for pos, _ in parts] or [begin], np.int64)
    data = np.array([data.ctypes.data for _, data in parts] or [pos.ctypes.data], np.uintp)
    n_bytes: int = lib.llama_kvtool_set_archive(
        handle, layer, data.ctypes.data, pos.ctypes.data, len(pos), begin, end
    )
    return n_bytes


def _fit_clusters(saved: Mapping[str, np.ndarray], end: int, n_block: int, n_bytes: int) -> bool:
    """Return True if the saved clusters can belong to tokens before position `end`.

    n_bytes: bytes of a block's clusters; 0 if the archive has no clusters.
    """
    if CLUSTERS not in saved or not n_bytes:
        return True
    table = saved[CLUSTERS]
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != len(Clusters._fields):
        return False
    return all(
        first % n_block == last % n_block == 0
        and 0 <= first < last <= end
        and (data := saved.get(clusters_name(i))) is not None
        and data.dtype == np.uint8
        and data.nbytes == (last - first) // n_block * n_bytes
        for i, (first, last, *_) in enumerate(table.tolist())
    )


def _table_of(saved: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the array `TABLE` from the arrays of `save`; None if it is missing or not valid."""
    table = saved.get(TABLE)
    fits = table is not None and table.dtype == np.int64 and table.ndim == 1 and len(table) >= _N_FIXED
    return table if fits else None
