"""Random calls of the patched library's C API: each succeeds, or fails with a reason and changes nothing.

    python -m tests.fuzz.fuzz_api --n 10000   # number of plans; other calls are made between plans
    make fuzz-sanitized                       # the same in a build with -fsanitize=address,undefined

This file computes the expected answers from the rules in llama-kvtool.h, so it checks more than "no crash".
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from kvtool.errors import LibraryError
from kvtool.llama.cache.archive import set_layer
from kvtool.llama.cache.context import Context
from kvtool.llama.libllama.library import Edit, EnableParams, check, error_text, lib
from kvtool.llama.loaded.model import Model
from kvtool.policy import Signal
from tests import tiny


class Move(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("row", "dst", "src", "delta")]


class Term(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int32) for name in ("row", "dst", "src")), ("weight", ctypes.c_float)]


N_LAYER, N_HEAD_KV, N_GROUP, N_DIM, N_VOCAB = 2, 2, 2, 32, 320
N_ROW = N_LAYER * N_HEAD_KV
N_BATCH = 32
N_SIGNAL = 7
LARGEST = 2**31 - 1
MAX_POSITION = 2**40
"""Positions in a stream are smaller than this."""
BAD = (-(2**31), -1, LARGEST, 2**30, N_ROW, 100_000)

# without flash attention, V is stored transposed, so it cannot be quantized
CACHES = [
    *(("f32", "f32", "off"), ("f32", "f32", "on"), ("f16", "f16", "off"), ("f16", "f16", "on")),
    *(("q8_0", "f16", "off"), ("q8_0", "q8_0", "on"), ("bf16", "f32", "off"), ("q4_0", "q8_0", "on")),
]


class Fuzz:
    """A context, the state that its cache should have, and random calls."""

    def __init__(self, model, rng, counts):
        self.rng, self.counts = rng, counts
        type_k, type_v, flash = CACHES[rng.integers(len(CACHES))]
        n_cell = int(rng.choice([256, 512]))
        self.context = Context(model, n_cell, N_BATCH, type_k=type_k, type_v=type_v, flash=flash, n_threads=1)
        self.pointer = self.context._context
        self.n_table = n_cell
        self.cells = [n_cell] * N_LAYER
        self.signals, self.ragged, self.n_query = 0, False, 1
        self.n_future = 0
        self.n_recall, self.n_synthetic, self.n_exact, self.n_traced = 0, 0, 0, 0
        self.forget()
        self.forget_archive()

    def forget_archive(self):
        # `spans`: where the tokens of each layer begin and end. `n_slab`: slabs of memory, including unused
        # slabs.
        self.spans, self.has_file, self.n_slab = [(0, 0)] * N_LAYER, False, 0

    def forget(self):
        self.live = np.zeros(N_ROW, np.int64)
        self.n_used, self.next, self.any_pos = 0, 0, True
        self.n_queries = 0
        self.watches = True

    @property
    def row_cells(self):
        return np.repeat(self.cells, N_HEAD_KV)

    def close(self):
        self.context.close()

    def maybe(self, share):
        return self.rng.random() < share

    def one_of(self, *values):
        return int(values[self.rng.integers(len(values))])

    def expect(self, name, status, ok):
        """Check a call's status. ok: True if the call is valid.

        An invalid call must be refused with a reason.
        """
        self.counts[name, "done" if ok else "refused"] += 1
        reason = error_text()
        assert (status >= 0) == ok, f"{name}: {status} where {'done' if ok else 'refused'} was due: {reason}"
        assert ok or reason, f"{name}: refused without a reason"

    def call(self):
        calls = [self.apply] * 10 + [self.decode] * 6
        calls += [self.read, self.write, self.recent, self.read_keys, self.resize] * 2
        calls += [self.future, self.future, self.queries, self.value_norms]
        calls += [self.seen, self.watch, self.small, self.enable if self.maybe(0.3) else self.small]
        archive = [self.push] * 4 + [self.base, self.rewind] + [self.copy, self.copy]
        archive += [self.forget_tokens if self.maybe(0.2) else self.push]
        archive += [self.table, self.table, self.clusters, self.clusters, self.seal, self.seal]
        archive += [self.file, self.trace, self.attended]
        calls += archive * 2 if self.n_recall else [archive[self.rng.integers(len(archive))]]
        calls[self.rng.integers(len(calls))]()

    def enable(self, signals=None):
        signals = int(self.rng.integers(0, 1 << N_SIGNAL)) if signals is None else signals
        ragged = self.maybe(0.4)
        params = EnableParams(signals, int(self.rng.integers(0, 3)), self.one_of(1, 1, 3, 50, LARGEST))
        params.n_draft = self.one_of(0, 3, 3, 8)
        params.n_future = self.one_of(0, 0, 1, 30)
        params.logn, params.ragged = self.maybe(0.2), ragged
        if not (ragged or params.logn) and self.maybe(0.8):
            params.n_recall, params.n_near = self.one_of(1, 16, 100), self.one_of(1, 20, 64)
            params.n_exact = self.one_of(0, 1, 40, 40, LARGEST)
            if self.maybe(0.6):
                # 100 cells are enough: a step has at most N_BATCH * N_GROUP = 64 synthetic cells
                params.n_recall, params.n_synthetic = 100, self.one_of(N_GROUP, N_GROUP, N_GROUP + 1)
            # ggml types: f32, f16, q8_0 and q4_0
            params.type_k, params.type_v = self.one_of(0, 1, 8, 2), self.one_of(0, 1, 8, 2)
        ok = not self.maybe(0.2)
        if not ok:
            bad = [("signals", 1 << N_SIGNAL), ("signals", 2**32 - 1), ("group", 3), ("n_query", 0)]
            bad += [("n_query", -5), ("n_draft", -1), ("n_draft", -(2**31)), ("n_future", -1)]
            bad += [("n_future", -(2**31)), ("n_recall", -1), ("n_recall", LARGEST)]
            bad += [("n_recall", max(self.cells))]
            if params.n_recall:
                bad += [("n_near", 0), ("n_near", -1), ("n_near", LARGEST), ("n_exact", -1)]
                bad += [("type_k", -1), ("type_v", 999), ("type_k", LARGEST), ("type_v", 4), ("ragged", True)]
                bad += [("logn", True)]
                # blocks of these types have 256 numbers, which is more than a head has
                bad += [("type_k", 12), ("type_v", 16)]
                bad += [("n_synthetic", -1), ("n_synthetic", LARGEST), ("n_exact", -(2**31))]
            setattr(params, *bad[self.rng.integers(len(bad))])
        ok = ok and (ragged or len(set(self.cells)) == 1)
        if (params.signals & Signal.RECENT or params.n_future) and params.n_query == LARGEST:
            # so many queries need a terabyte, and must be refused: with n_future the library stores them, and
            # with RECENT it stores their attention to each cell. With RECENT alone and fewer than 100 cells,
            # the call could succeed and use most of the memory, so it gets only 3 queries
            if min(self.cells) < 100 and not params.n_future:
                params.n_query = 3
            else:
                ok = False
        status = lib.llama_kvtool_enable(self.pointer, ctypes.byref(params))
        self.expect("enable", status, ok)
        if ok:
            assert status == N_ROW
            self.signals, self.ragged, self.n_query = signals, ragged, params.n_query
            self.n_future = params.n_future
            self.n_table = self.n_table if ragged else self.cells[0]
            self.forget()
            self.n_recall, self.n_synthetic, self.n_exact = (
                params.n_recall,
                params.n_synthetic,
                params.n_exact,
            )
            self.n_traced = 0 if self.n_synthetic else self.n_recall
            self.forget_archive()
            for _ in range(self.one_of(0, 4)):
                self.file()

    def seen(self):
        n = self.one_of(0, 5, 1000, LARGEST, LARGEST - 3, -1, -(2**31))
        self.expect("seen", lib.llama_kvtool_seen(self.pointer, n), n >= 0)

    def watch(self):
        watches = self.maybe(0.7)
        self.expect("watch", lib.llama_kvtool_watch(self.pointer, watches), True)
        self.watches = watches

    def small(self):
        assert lib.llama_kvtool_n_dim(self.pointer) == N_DIM
        assert lib.llama_kvtool_cache_bytes(self.pointer) > 0
        n = self.one_of(N_ROW, N_ROW, 0, -1, N_ROW + 1)
        out = np.empty(max(n, 0), np.int32)
        status = lib.llama_kvtool_row_layers(self.pointer, out.ctypes.data if self.maybe(0.9) else None, n)
        if status >= 0:
            assert out.tolist() == np.repeat(np.arange(N_LAYER), N_HEAD_KV).tolist()
        # each call with a null pointer is refused
        for name, status in (
            ("n_dim", lib.llama_kvtool_n_dim(None)),
            ("cache_bytes", lib.llama_kvtool_cache_bytes(None)),
            ("deferred_bytes", lib.llama_kvtool_deferred_bytes(None)),
            ("row_layers", lib.llama_kvtool_row_layers(None, None, N_ROW)),
            ("enable", lib.llama_kvtool_enable(self.pointer, None)),
            ("resize", lib.llama_kvtool_resize(self.pointer, None, N_LAYER)),
            ("read", lib.llama_kvtool_read(self.pointer, 1, None, N_ROW, 1)),
            ("write", lib.llama_kvtool_write(self.pointer, 1, None, N_ROW, 1)),
            ("read_keys", lib.llama_kvtool_read_keys(self.pointer, None, None, None, N_ROW, 1, N_DIM)),
            ("apply", lib.llama_kvtool_apply(self.pointer, None)),
            ("read_future", lib.llama_kvtool_read_future(self.pointer, 1, 0, None, None, N_ROW, N_GROUP, 1)),
            ("read_value_norms", lib.llama_kvtool_read_value_norms(self.pointer, None, N_ROW, 1)),
            ("get_queries", lib.llama_kvtool_get_queries(None, None, None)),
            ("forget", lib.llama_kvtool_forget(None)),
        ):
            self.expect(name, status, False)

    def resize(self):
        most = self.live.reshape(N_LAYER, N_HEAD_KV).max(axis=1).tolist()
        if not self.ragged:
            most = [self.n_used + self.n_recall] * N_LAYER
        if self.ragged:
            n_cells = [max(n, 1) + int(self.rng.integers(0, 200)) for n in most]
        else:
            # multiples of 256, because llama.cpp pads attention to such sizes
            n_cells = [-(-max(most[0], 1) // 256) * 256 + 256 * int(self.rng.integers(0, 2))] * N_LAYER
        n_layer = N_LAYER if self.maybe(0.9) else self.one_of(0, 1, -1, 3)
        if self.maybe(0.3):
            n_cells[self.rng.integers(N_LAYER)] = self.one_of(*BAD[:3], 0, most[0] - 1, most[1] + 7)
        least = self.n_recall + 1
        ok = n_layer == N_LAYER and all(n >= max(m, least) for n, m in zip(n_cells, most, strict=True))
        ok = ok and (self.ragged or n_cells[0] == n_cells[1]) and max(n_cells) < 10_000
        n_cell = np.array(n_cells + [1], np.int32)
        status = lib.llama_kvtool_resize(self.pointer, n_cell.ctypes.data, n_layer)
        self.expect("resize", status, ok)
        if ok:
            self.cells = n_cells
            self.n_table = self.n_table if self.ragged else n_cells[0]

    def some_signal(self):
        """Return (signal, n_row, n_cell, True if the library must accept a read with these arguments)."""
        enabled = [1 << i for i in range(N_SIGNAL) if self.signals >> i & 1]
        signal = self.one_of(1, 2, 4, 8, 16, 32, 64, 0, 3, 128, 2**31, *enabled * 8)
        most = max(self.cells)
        n_cell = self.one_of(0, 1, most, most, most // 2, most // 2, most + 1, -1)
        n_row = self.one_of(*[N_ROW] * 8, 0, -1, N_ROW + 1)
        ok = n_row == N_ROW and 0 <= n_cell <= most and signal in [1 << i for i in range(N_SIGNAL)]
        return signal, n_row, n_cell, ok and bool(self.signals & signal)

    def read(self):
        signal, n_row, n_cell, ok = self.some_signal()
        out = np.full((N_ROW, max(n_cell, 0)), -7, np.float32)
        status = lib.llama_kvtool_read(self.pointer, signal, out.ctypes.data, n_row, n_cell)
        self.expect("read", status, ok)
        assert ok or (out == -7).all()

    def write(self):
        signal, n_row, n_cell, ok = self.some_signal()
        ok = ok and signal != Signal.RECENT
        values = self.rng.integers(0, 50, (N_ROW, max(n_cell, 0))).astype(np.float32)
        status = lib.llama_kvtool_write(self.pointer, signal, values.ctypes.data, n_row, n_cell)
        self.expect("write", status, ok)
        if ok:
            actual = np.empty_like(values)
            check(lib.llama_kvtool_read(self.pointer, signal, actual.ctypes.data, N_ROW, n_cell))
            values[np.arange(n_cell) >= self.row_cells[:, None]] = 0
            np.testing.assert_array_equal(actual, values)

    def recent(self):
        """Read or write the recent attention of the queries."""
        most = max(self.cells)
        n_cell = self.one_of(0, 1, 20, 20, most, most + 1, -1)
        n_query = self.one_of(*[self.n_query] * 6, 0, -1, self.n_query - 1)
        n_row = self.one_of(*[N_ROW] * 6, 0, -1, N_ROW + 1)
        ok = n_row == N_ROW and 0 <= n_cell <= most and n_query == self.n_query
        ok = ok and bool(self.signals & Signal.RECENT)
        n = self.n_query if self.signals & Signal.RECENT else 1
        values = self.rng.random((n, N_ROW, max(n_cell, 0))).astype(np.float32)
        writes = self.maybe(0.5)
        function = lib.llama_kvtool_write_recent if writes else lib.llama_kvtool_read_recent
        status = function(self.pointer, values.ctypes.data, n_query, n_row, n_cell)
        self.expect("write_recent" if writes else "read_recent", status, ok)
        if ok and writes:
            sums = np.empty((N_ROW, n_cell), np.float32)
            check(lib.llama_kvtool_read(self.pointer, int(Signal.RECENT), sums.ctypes.data, N_ROW, n_cell))
            values[:, np.arange(n_cell) >= self.row_cells[:, None]] = 0
            np.testing.assert_allclose(sums, values.sum(axis=0), rtol=1e-4)

    def read_keys(self):
        n = self.one_of(0, 1, 9, 9, 30, min(self.cells), max(self.cells), max(self.cells) + 1, -1)
        first = self.rng.integers(0, max(min(self.cells) - n, 0) + 1, N_ROW)
        if self.maybe(0.3):
            first[self.rng.integers(N_ROW)] = self.one_of(*BAD)
        n_dim = self.one_of(N_DIM, N_DIM, N_DIM, N_DIM + 1, 0)
        ok = n_dim == N_DIM and 0 <= n <= max(self.cells)
        ok = ok and bool(((first >= 0) & (first + n <= self.row_cells)).all())
        first = first.astype(np.int32)
        delta = self.rng.integers(-50, 50, (N_ROW, max(n, 0))).astype(np.int32)
        out = np.full((N_ROW, max(n, 0), N_DIM), -7, np.float32)
        pointers = (array.ctypes.data for array in (first, delta, out))
        status = lib.llama_kvtool_read_keys(self.pointer, *pointers, N_ROW, n, n_dim)
        self.expect("read_keys", status, ok)
        assert ok or (out == -7).all()

    def future(self):
        most = max(self.cells)
        n_cell = self.one_of(0, 1, 30, 30, most, most + 1, -1)
        n_head = self.one_of(*[N_GROUP] * 4, N_GROUP + 1, N_GROUP - 1, 0, -1)
        n_row = self.one_of(*[N_ROW] * 6, 0, -1, N_ROW + 1)
        n_last = self.one_of(1, 1, 2, 0, -1, self.n_query, self.n_query + 1 if self.n_query < LARGEST else -2)
        pos = self.one_of(self.next, self.next, 0, LARGEST, -1)
        ok = n_row == N_ROW and 0 < n_cell <= most and n_head >= N_GROUP and bool(self.n_future)
        ok = ok and 0 < n_last <= min(self.n_query, self.n_queries) and pos >= 0
        mean, variance = (np.empty((N_ROW, max(n_head, 0), max(n_cell, 0)), np.float32) for _ in range(2))
        pointers = mean.ctypes.data, variance.ctypes.data
        shape = n_row, n_head, n_cell
        status = lib.llama_kvtool_read_future(self.pointer, n_last, pos, *pointers, *shape)
        self.expect("read_future", status, ok)
        assert not ok or not (variance < 0).any()

    def queries(self):
        """Read the last queries, write them back, and read them again."""
        n = lib.llama_kvtool_get_queries(self.pointer, None, None)
        self.expect("get_queries", n, bool(self.n_future))
        if n < 0 or self.n_query == LARGEST:
            return
        assert n == N_LAYER * N_HEAD_KV * N_GROUP * N_DIM
        values, pos = np.empty((self.n_query, n), np.float32), np.empty(self.n_query, np.int32)
        pointers = values.ctypes.data, pos.ctypes.data
        check(lib.llama_kvtool_get_queries(self.pointer, *pointers))
        assert (pos >= 0).sum() == min(self.n_queries, self.n_query)
        check(lib.llama_kvtool_set_queries(self.pointer, *pointers))
        second_values, second_pos = np.empty_like(values), np.empty_like(pos)
        check(lib.llama_kvtool_get_queries(self.pointer, second_values.ctypes.data, second_pos.ctypes.data))
        np.testing.assert_array_equal(second_values, values)
        np.testing.assert_array_equal(second_pos, pos)

    def value_norms(self):
        most = max(self.cells)
        n_cell = self.one_of(0, 1, 30, most, most + 1, -1)
        n_row = self.one_of(*[N_ROW] * 6, 0, -1, N_ROW + 1)
        ok = n_row == N_ROW and 0 < n_cell <= most
        out = np.empty((N_ROW, max(n_cell, 0)), np.float32)
        status = lib.llama_kvtool_read_value_norms(self.pointer, out.ctypes.data, n_row, n_cell)
        self.expect("read_value_norms", status, ok)
        assert not ok or not out[np.arange(n_cell) >= self.row_cells[:, None]].any()

    def decode(self):
        """Decode tokens like the engine. Sometimes an argument is invalid."""
        n = int(self.rng.integers(1, N_BATCH + 1))
        tokens = self.rng.integers(3, N_VOCAB, n).astype(np.int32)
        pos = self.next
        ok = self.n_used + n <= self.n_table - self.n_recall and pos + n <= LARGEST
        ok = ok and (not self.n_synthetic or not self.size or n * self.n_synthetic <= self.n_recall)
        if self.ragged:
            ok = 1 + n <= self.n_table and bool((self.live + n <= self.row_cells).all())
        if self.maybe(0.05):
            tokens[self.rng.integers(n)] = self.one_of(-1, N_VOCAB, LARGEST)
            ok = False
        elif self.maybe(0.05) and not self.any_pos:
            pos += self.one_of(-1, 1, 50)
            ok = False
        if pos + n > LARGEST:
            return
        try:
            self.context.decode(tokens, pos, int(self.rng.integers(0, 2)))
            reason = ""
        except LibraryError as error:
            reason = str(error)
        call = f"{n} tokens at {pos}, {self.n_used} of {self.n_table} cells, {self.live}: {reason}"
        assert ok == (not reason), call
        self.counts["decode", "done" if ok else "refused"] += 1
        if not ok:
            return
        self.next, self.any_pos = pos + n, False
        self.n_queries += n * self.watches
        self.n_used += n
        self.live += n
        if self.ragged:
            self.n_used = min(self.n_used, self.n_table)

    def apply(self):
        rng, most = self.rng, max(self.cells)
        cells = self.row_cells
        n_keep = int(rng.integers(0, min(max(self.n_used, 1), self.n_table) + 1))
        if self.ragged:
            n_keep = int(rng.integers(0, min(self.cells) + 1))
        rows = (np.minimum(rng.integers(0, n_keep + 1, N_ROW), cells)).astype(np.int32)
        # llama-kvtool.h allows pos_0 up to LARGEST - most
        pos_0 = self.one_of(0, 0, 3, 100, 5000, int(rng.integers(0, 3000)), LARGEST - most)

        n_move = int(rng.choice([0, 1, 5, 40, 200]))
        i_cells = rng.permutation(N_ROW * min(self.cells))[:n_move]
        row, dst = np.divmod(i_cells, min(self.cells))
        src, delta = (
            rng.integers(0, min(self.cells), len(i_cells)),
            rng.choice([0, 0, 5, -9, 1000], len(i_cells)),
        )
        moves = np.stack([row, dst, src, delta], axis=1).astype(np.int64)
        terms = []
        for index in rng.permutation(N_ROW * min(self.cells))[: int(rng.choice([0, 0, 1, 6, 30]))]:
            row, cell = divmod(int(index), min(self.cells))
            for _ in range(int(rng.choice([1, 2, 3, 7]))):
                terms.append([row, cell, int(rng.integers(0, min(self.cells))), float(rng.normal())])
        n_hidden = 0 if self.ragged or self.maybe(0.9) else int(rng.integers(0, n_keep + 1))
        if n_hidden and self.maybe(0.5):
            pos_0 = -int(rng.integers(0, n_hidden + 1))
        keep_rows = self.ragged
        spoil = int(rng.integers(0, 24))
        if spoil == 0 and len(moves):
            moves[rng.integers(len(moves)), rng.integers(3)] = self.one_of(*BAD, -1, most)
        elif spoil == 1 and terms:
            terms[rng.integers(len(terms))][rng.integers(3)] = self.one_of(*BAD, -1, most)
        elif spoil == 2 and terms:
            wrong = [np.nan, np.inf, -np.inf, 1e38]
            terms[rng.integers(len(terms))][3] = wrong[rng.integers(len(wrong))]
        elif spoil == 3:
            n_keep = self.one_of(-1, most + 1, -(2**31), LARGEST)
        elif spoil == 4:
            pos_0 = self.one_of(-n_hidden - 1, -(2**31), LARGEST, LARGEST - most + 1)
        elif spoil == 5:
            n_hidden = self.one_of(-1, n_keep + 1, LARGEST)
        elif spoil == 6:
            keep_rows = not keep_rows
        elif spoil == 7:
            rows[rng.integers(N_ROW)] = self.one_of(-1, n_keep + 1, LARGEST)
        elif spoil == 8 and len(moves) > 1:
            moves[-1, :2] = moves[0, :2]
        elif spoil == 9 and len(terms) > 2:
            terms.append(list(terms[0]))

        c_moves = (Move * max(len(moves), 1))(*(Move(*map(int, move)) for move in moves))
        c_terms = (Term * max(len(terms), 1))(*(Term(*term) for term in terms))
        edit = Edit(
            n_move=len(moves),
            n_term=len(terms),
            n_keep=n_keep,
            pos_0=pos_0,
            moves=ctypes.addressof(c_moves),
            terms=ctypes.addressof(c_terms),
        )
        edit.n_hidden, edit.force_graph = n_hidden, self.maybe(0.5)
        if keep_rows:
            edit.n_keep_row = rows.ctypes.data
        if spoil == 10:
            name, value = [("n_move", -1), ("n_term", -3), ("n_move", 5), ("n_term", 5)][rng.integers(4)]
            setattr(edit, name, value)
            setattr(edit, name.removeprefix("n_") + "s", None)
        ok = spoil != 10 and self.can_be(moves, terms, n_keep, rows if keep_rows else None, pos_0, n_hidden)
        # For some refused edits, compare the states before and after. (The state of ragged rows cannot be
        # saved.)
        before = None if ok or self.ragged or self.maybe(0.7) else self.context.state()
        status = lib.llama_kvtool_apply(self.pointer, ctypes.byref(edit))
        self.expect("apply", status, ok)
        assert before is None or self.context.state() == before, "a refused edit has changed the cache"
        if ok:
            self.n_used, self.next = n_keep, pos_0 + n_keep
            self.n_queries *= n_keep > 0
            # if all kept cells are hidden, the next token may have any position
            self.any_pos = n_hidden == n_keep
            if self.any_pos:
                self.next = int(rng.integers(0, 50))
            if self.ragged:
                self.live = rows.astype(np.int64)
                self.n_used = min(n_keep, 1)

    # the archive

    @property
    def size(self):
        return self.spans[0][1] - self.spans[0][0]

    def push(self):
        """Archive random cells as the next tokens."""
        n_cell = self.cells[0] - self.n_recall
        cells = self.rng.integers(0, n_cell, self.one_of(0, 1, 16, 16, 16, 300)).astype(np.int32)
        begin, end = self.spans[0]
        pos = end if self.size else self.one_of(0, 4, 255, 256, 1000, 2**31, MAX_POSITION - 20)
        n, pointer, n_max = len(cells), cells.ctypes.data, self.one_of(1, 5, 256, 300, 10_000, 2**62)
        spoil = int(self.rng.integers(0, 20))
        if spoil == 0 and n:
            cells[self.rng.integers(n)] = self.one_of(-1, n_cell, LARGEST, -(2**31))
        elif spoil == 1:
            n = self.one_of(-1, -(2**31))
        elif spoil == 2:
            pointer = None
        elif spoil == 3:
            pos = self.one_of(-1, pos + 1, MAX_POSITION, 2**62, -(2**62))
        elif spoil == 4:
            n_max = self.one_of(0, -1, -(2**62))
        ok = n >= 0 and (n == 0 or (pointer is not None and bool(((cells >= 0) & (cells < n_cell)).all())))
        ok = (
            ok
            and 0 <= pos <= MAX_POSITION - n
            and n_max > 0
            and (not self.size or pos == end)
            and self.n_recall > 0
        )
        status = lib.llama_kvtool_archive(self.pointer, pointer, n, pos, n_max)
        self.expect("archive", status, ok)
        if ok and n:
            self.spans = [(max(begin if self.size else pos, pos + n - n_max), pos + n)] * N_LAYER
            self.whole()
        self.check_archive()

    def base(self):
        base = self.one_of(0, 5, 300, 100_000, MAX_POSITION - 1, MAX_POSITION, -1, 2**62, -(2**62))
        ok = 0 <= base < MAX_POSITION and self.n_recall > 0
        self.expect("base", lib.llama_kvtool_base(self.pointer, base), ok)

    def forget_tokens(self):
        ok = self.n_recall > 0
        self.expect("forget", lib.llama_kvtool_forget(self.pointer), ok)
        if ok:
            has_file = self.has_file
            self.forget_archive()
            self.has_file = has_file
        self.check_archive()

    def rewind(self):
        (begin, last), n_cell = self.spans[0], self.cells[0] - self.n_recall
        end = int(self.rng.integers(begin, last + 1)) if self.maybe(0.5) else last
        cell, n = self.one_of(0, 0, 7, n_cell - 1), self.one_of(0, 1, 5, 40, end - begin)
        base, coming = (
            self.one_of(0, 5, 300, 100_000, MAX_POSITION - 1),
            self.one_of(0, end, end + 70, MAX_POSITION - 1),
        )
        spoil = int(self.rng.integers(0, 20))
        if spoil == 0:
            cell = self.one_of(-1, n_cell + 1, LARGEST)
        elif spoil == 1:
            n = self.one_of(-1, n_cell + 1, LARGEST, -(2**31))
        elif spoil == 2:
            end = self.one_of(-1, begin - 1, last + 1, 2**62, -(2**62))
        elif spoil == 3:
            base, coming = self.one_of(-1, MAX_POSITION, 2**62), self.one_of(0, -1, MAX_POSITION)
        ok = 0 <= cell <= n_cell - n and n >= 0 and begin + n <= end <= last and len(set(self.spans)) == 1
        ok = ok and 0 <= base < MAX_POSITION and 0 <= coming < MAX_POSITION and self.n_recall > 0
        status = lib.llama_kvtool_rewind(self.pointer, cell, n, end, base, coming)
        self.expect("rewind", status, ok)
        if ok:
            self.spans = [(begin, end - n) if begin < end - n else (0, 0)] * N_LAYER
            # an empty archive uses no memory, even if it is in a file
            self.n_slab *= self.size > 0
        self.check_archive(trims=ok)

    def copy(self):
        """Read a layer's tokens from the archive. Write the same bytes, or random bytes, into the archive."""
        layer = self.one_of(0, 1, 0, 1, 0, 1, -1, N_LAYER, LARGEST)
        layer_span = self.spans[layer] if 0 <= layer < N_LAYER else (0, 0)
        begin, end = (int(n) for n in np.sort(self.rng.integers(layer_span[0], layer_span[1] + 1, 2)))
        if self.maybe(0.2):
            begin, end = layer_span
        if self.maybe(0.2):
            wrong = (
                (end + 1, end),
                (-1, end),
                (layer_span[0] - 1, end),
                (begin, layer_span[1] + 1),
                (0, MAX_POSITION + 1),
            )
            begin, end = wrong[self.rng.integers(len(wrong))]
        n_bytes = lib.llama_kvtool_get_archive(self.pointer, 0, None, 0, 1)
        n = max(n_bytes, 0) * max(min(end - begin, 20_000), 0)
        may = self.n_recall > 0 and 0 <= layer < N_LAYER and begin <= end
        data = np.zeros(n + 1, np.uint8)
        status = lib.llama_kvtool_get_archive(self.pointer, layer, data.ctypes.data, begin, end)
        ok = may and layer_span[0] <= begin and end <= layer_span[1]
        self.expect("get_archive", status, ok)
        assert not ok or status == n
        if self.maybe(0.5):
            data = self.rng.integers(0, 256, len(data)).astype(np.uint8)
        if self.maybe(0.3):
            shift = int(self.rng.integers(0, 2000))
            begin, end = begin + shift, end + shift
        ok = may and begin >= 0 and end <= MAX_POSITION
        status = lib.llama_kvtool_set_archive(self.pointer, layer, None, None, 0, begin, end)
        self.expect("set_archive", status, ok)
        if end - begin <= 20_000 and self.maybe(0.3):
            status = set_layer(self.pointer, layer, [(begin, data)], begin, end)
            self.expect("set_archive", status, ok)
            if ok:
                self.spans = [span if span == (begin, end) else (0, 0) for span in self.spans]
                self.spans[layer] = begin, end
                actual = np.zeros_like(data)
                check(lib.llama_kvtool_get_archive(self.pointer, layer, actual.ctypes.data, begin, end))
                assert (actual[:-1] == data[:-1]).all()
                if self.maybe(0.7):
                    other = 1 - layer
                    check(set_layer(self.pointer, other, [(begin, data)], begin, end))
                    self.spans[other] = begin, end
        self.check_archive()

    def table(self):
        """Read the archive's table, and write it back.

        Sometimes a number is changed or added before it is written.
        """
        n = lib.llama_kvtool_get_archive_table(self.pointer, None, 0)
        self.expect("get_archive_table", n, self.n_recall > 0)
        table = np.zeros(max(n, 3), np.int64)
        n_given = n + self.one_of(0, 0, 1, -1, -n)
        status = lib.llama_kvtool_get_archive_table(self.pointer, table.ctypes.data, n_given)
        self.expect("get_archive_table", status, self.n_recall > 0 and n_given == n)
        if status < 0 and self.n_recall:
            check(lib.llama_kvtool_get_archive_table(self.pointer, table.ctypes.data, n))
        if self.maybe(0.5) and len(table) == 3:
            table = np.concatenate((table, [self.one_of(0, table[0], table[1] + 1), 7]))
        if self.maybe(0.5):
            table[self.rng.integers(len(table))] = self.one_of(*table, -1, 5, 2**62, -(2**62), MAX_POSITION)
        begin, end, far = table[:3].tolist()
        first, base = table[3::2].tolist(), table[4::2].tolist()
        ok = self.n_recall > 0 and all(span == (begin, end) for span in self.spans) and 0 <= far <= end
        ok = ok and (begin == end or (bool(first) and first[0] <= begin))
        ok = ok and first == sorted({*first}) and all(0 <= at <= end for at in first)
        ok = ok and all(0 <= at < MAX_POSITION for at in base)
        pointer, n = table.ctypes.data, len(table)
        if self.maybe(0.1):
            wrong = [(None, n), *((pointer, other) for other in (0, -1, 4, 2))]
            pointer, n = wrong[self.rng.integers(5)]
            ok = False
        self.expect("set_archive_table", lib.llama_kvtool_set_archive_table(self.pointer, pointer, n), ok)
        self.check_archive()

    def clusters(self):
        """Read and write the clusters of some blocks."""
        span = np.full(4, -7, np.int64)
        n_bytes = lib.llama_kvtool_clusters(self.pointer, span.ctypes.data)
        self.expect("clusters", n_bytes, self.n_recall > 0)
        assert n_bytes == (128 * N_ROW if self.n_exact else 0) or not self.n_recall
        is_far = self.maybe(0.5)
        known = span[:2] if is_far else span[2:]
        if self.maybe(0.5):
            begin, end = known.tolist()
        else:
            begin, end = (
                256 * int(n) for n in np.sort(self.rng.integers(-1, self.spans[0][1] // 256 + 2, 2))
            )
        if self.maybe(0.2):
            begin, end = (
                self.one_of(begin, -256, begin + 1, MAX_POSITION),
                self.one_of(end, 2**62, end - 1, -(2**62)),
            )
        least, most = (n // 256 * 256 for n in self.spans[0])
        may = self.n_recall > 0 and len(set(self.spans)) == 1
        may = may and begin % 256 == end % 256 == 0 and least <= begin <= end <= most
        n = max((end - begin) // 256 * n_bytes, 0) if may else 0
        data = self.rng.integers(0, 256, n + 1).astype(np.uint8)
        ok = may and (not n or (known[0] <= begin and end <= known[1]))
        if self.maybe(0.5):
            status = lib.llama_kvtool_get_clusters(self.pointer, data.ctypes.data, begin, end, is_far)
            self.expect("get_clusters", status, ok)
            assert not ok or status == n
        status = lib.llama_kvtool_set_clusters(self.pointer, data.ctypes.data, begin, end, is_far)
        self.expect("set_clusters", status, may)

    def seal(self):
        n_max = self.one_of(1, 500, 2**62, 2**62, 0, -(2**62))
        ok = self.n_recall > 0 and len(set(self.spans)) == 1 and n_max > 0
        n_left = lib.llama_kvtool_seal(self.pointer, n_max)
        self.expect("seal", n_left, ok)
        while ok and n_left and self.maybe(0.8):
            assert n_left < N_ROW
            n_left = lib.llama_kvtool_seal(self.pointer, n_max)

    def file(self):
        """Name a file for the archive. A new file works, and the library unlinks it at once.

        A path that exists already, or that is impossible, must be refused.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "archive"
            path, is_new = [(path, True), (path, True), (folder, False), (path / "file", False)][
                self.one_of(0, 1, 2, 3)
            ]
            path_arg = None if self.maybe(0.1) else os.fsencode(path)
            is_free = (
                self.n_recall > 0 and not self.has_file and not lib.llama_kvtool_archive_bytes(self.pointer)
            )
            ok = is_free and is_new and path_arg is not None
            self.expect("archive_file", lib.llama_kvtool_archive_file(self.pointer, path_arg), ok)
            assert os.listdir(folder) == []
        self.has_file |= ok

    def whole(self):
        """Correct the expected `spans` by the archive's table.

        An archive with clusters forgets only whole blocks, so it may have forgotten up to 255 more tokens.
        """
        begin, end = self.spans[0]
        if self.n_exact and begin < end and len(set(self.spans)) == 1:
            table = np.empty(lib.llama_kvtool_get_archive_table(self.pointer, None, 0), np.int64)
            check(lib.llama_kvtool_get_archive_table(self.pointer, table.ctypes.data, len(table)))
            assert begin <= table[0] <= min(begin + 255, end)
            self.spans = [(int(table[0]), end)] * N_LAYER

    def trace(self):
        n = self.one_of(0, 1, 7, 300, self.n_recall, self.n_recall, -1, 4097, LARGEST)
        ok = self.n_recall > 0 and (0 <= n <= 4096 if self.n_synthetic else n == self.n_recall)
        self.expect("trace", lib.llama_kvtool_trace(self.pointer, n), ok)
        self.n_traced = n if ok else self.n_traced

    def attended(self):
        n_row, n = self.one_of(N_ROW, N_ROW, N_ROW, 0, -1), self.one_of(*[self.n_traced] * 3, 0, -1)
        out = np.full((N_ROW, max(self.n_traced, 1)), -2, np.int64)
        attn = np.full(out.shape, -2, np.float32)
        pointer = None if self.maybe(0.1) else out.ctypes.data
        ok = self.n_recall > 0 and pointer is not None and n_row == N_ROW and n == self.n_traced
        self.expect(
            "attended", lib.llama_kvtool_attended(self.pointer, pointer, attn.ctypes.data, n_row, n), ok
        )
        if ok and n:
            assert ((out == -1) | ((out >= 0) & (out < MAX_POSITION))).all()
            # a key's attention, at most 1, is summed over the step's tokens and the row's N_GROUP query heads
            assert ((attn >= 0) & (attn <= 1.001 * N_GROUP * N_BATCH)).all()

    def check_archive(self, *, trims=False):
        """Check that the archive has the expected tokens, and enough memory for them.

        trims: True if the archive has just freed its unused slabs.
        """
        if not self.n_recall:
            return
        table = np.empty(lib.llama_kvtool_get_archive_table(self.pointer, None, 0), np.int64)
        check(lib.llama_kvtool_get_archive_table(self.pointer, table.ctypes.data, len(table)))
        assert tuple(table[:2].tolist()) == self.spans[0], (table, self.spans)
        slab = lib.llama_kvtool_archive_slab(self.pointer, None)
        n_slab = lib.llama_kvtool_archive_bytes(self.pointer) / slab
        begin, end = max(self.spans, key=lambda span: span[1] - span[0])
        n_used = (end - 1) // 256 - begin // 256 + 1 if begin < end else 0
        # an archive in a file does not free slabs
        self.n_slab = n_used if trims and not self.has_file else max(self.n_slab, n_used)
        # `slab` is the size of a slab with clusters. Unused slabs and the slabs of the newest blocks have no
        # clusters, so the memory may be less than n_slab times `slab`.
        assert (0.8 if self.n_exact else 1) * self.n_slab <= n_slab <= self.n_slab, (n_slab, self.n_slab)

    def can_be(self, moves, terms, n_keep, rows, pos_0, n_hidden):
        """Return True if llama-kvtool.h allows the edit."""
        most, cells = max(self.cells), self.row_cells
        if (
            not (0 <= n_keep <= most - self.n_recall and -n_hidden <= pos_0 <= LARGEST - most)
            or (rows is not None) != self.ragged
        ):
            return False
        if not 0 <= n_hidden <= (0 if self.ragged else n_keep):
            return False
        if rows is not None and ((rows < 0) | (rows > np.minimum(n_keep, cells))).any():
            return False
        written, previous = set(), None
        for row, dst, src, _ in moves.tolist():
            if not (0 <= row < N_ROW and 0 <= dst < cells[row] and 0 <= src < cells[row]):
                return False
            if (row, dst) in written:
                return False
            written.add((row, dst))
        written = set()
        for row, dst, src, weight in terms:
            if not (0 <= row < N_ROW and 0 <= dst < cells[row] and 0 <= src < cells[row]):
                return False
            if not np.isfinite(weight):
                return False
            if (row, dst) != previous and (row, dst) in written:
                return False
            previous = row, dst
            written.add(previous)
        return True


def run(n, seed=0):
    """Try n plans, with 150 calls per context. Return a Counter of (call, "done" or "refused")."""
    counts = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        tiny.write_llama(
            path, n_layer=N_LAYER, n_head=4, n_head_kv=N_HEAD_KV, head_dim=N_DIM, n_vocab=N_VOCAB
        )
        model = Model(path)
        number = seed
        while counts["apply", "done"] + counts["apply", "refused"] < n:
            rng = np.random.default_rng(number)
            fuzz = Fuzz(model, rng, counts)
            try:
                fuzz.enable(signals=int(rng.integers(0, 1 << N_SIGNAL)))
                for _ in range(150):
                    fuzz.call()
            except AssertionError as error:
                raise AssertionError(f"context {number}: {error}") from error
            finally:
                fuzz.close()
            number += 1
        model.close()
    return counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=10_000, help="how many plans")
    parser.add_argument("--seed", type=int, default=0, help="of the first context")
    args = parser.parse_args()
    for (name, what), count in sorted(run(args.n, args.seed).items()):
        print(f"{count:7} {name} {what}")


if __name__ == "__main__":
    main()
