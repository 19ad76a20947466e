"""Moves of cells after an eviction: the kernels against a plain implementation of their docstrings."""

import numpy as np
import pytest

from kvtool.engine.moves import deltas, fill_holes
from kvtool.engine.rows import Rows


def plain_fill(keep, n_keep):
    """Return the source cell for each of the first n_keep cells of one row.

    A cell that stays is its own source. The holes get the kept cells behind the first n_keep cells, in order.
    """
    source = list(range(n_keep))
    tail = [cell for cell in range(n_keep, len(keep)) if keep[cell]]
    holes = [cell for cell in range(n_keep) if not keep[cell]]
    for hole, cell in zip(holes, tail, strict=True):
        source[hole] = cell
    return source


def filled(keep):
    n_keep = keep.sum(axis=1, dtype=np.int32)
    source = np.full((len(keep), n_keep.max()), -1, np.int32)
    fill_holes(keep, n_keep, source)
    return source


def random_keep(rng, n_row, n, n_keep):
    keep = np.zeros((n_row, n), np.bool_)
    for row in keep:
        row[rng.permutation(n)[:n_keep]] = True
    return keep


@pytest.mark.parametrize("seed", range(20))
def test_holes_are_filled_with_kept_cells_of_the_tail_in_order(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 60))
    keep = random_keep(rng, 5, n, int(rng.integers(1, n + 1)))
    source = filled(keep)
    assert source.tolist() == [plain_fill(row.tolist(), source.shape[1]) for row in keep]


@pytest.mark.parametrize(
    ("keep", "source"),
    [
        ("11111", [0, 1, 2, 3, 4]),
        ("11100", [0, 1, 2]),
        ("0001111111", [7, 8, 9, 3, 4, 5, 6]),
        ("000001", [5]),
        ("100000", [0]),
    ],
    ids=["nothing is evicted", "the tail", "the front", "all but the last", "all but the first"],
)
def test_holes_at_both_ends_are_filled(keep, source):
    assert filled(np.array([[cell == "1" for cell in keep]] * 2)).tolist() == [source] * 2


@pytest.mark.parametrize("seed", range(10))
def test_dead_cells_of_ragged_rows_are_their_own_source(seed):
    rng = np.random.default_rng(300 + seed)
    keep = rng.random((5, 30)) < rng.random((5, 1))
    keep[:, 0] = True
    source = filled(keep)
    for row, keep_row in zip(source, keep, strict=True):
        n = keep_row.sum()
        assert sorted(row[:n].tolist()) == np.flatnonzero(keep_row).tolist()
        assert row[n:].tolist() == list(range(n, len(row)))


def test_new_tokens_come_to_the_end_of_every_row():
    rows = Rows(np.zeros(2, np.int32), 6, ragged=True)
    rows.append(3)
    # one row keeps one token, and the other row keeps all three
    rows.move(np.empty((0, 4), np.int32), np.array([1, 3], np.int32), next_rot=20)
    rows.append(2)
    assert (rows.n_past, rows.n_kv, rows.next_rot) == (5, 5, 22)
    assert (rows.pos[0, :3].tolist(), rows.pos[1, :5].tolist()) == ([0, 3, 4], [0, 1, 2, 3, 4])
    assert (rows.rot[0, :3].tolist(), rows.rot[1, :5].tolist()) == ([0, 20, 21], [0, 1, 2, 20, 21])
    assert rows.live.tolist() == [3, 5]


def test_append_continues_after_move_resize_and_rotate_from():
    rows = Rows(np.zeros(2, np.int32), 6, ragged=False)
    rows.append(3)
    rows.move(np.array([[0, 0, 2, 5], [1, 1, 2, 0]], np.int32), np.array([2, 2], np.int32), next_rot=20)
    rows.append(1)
    rows.resize(8)
    rows.append(1)
    rows.rotate_from(40)
    rows.append(2)
    assert rows.pos[:, : rows.n_kv].tolist() == [[2, 1, 3, 4, 5, 6], [0, 2, 3, 4, 5, 6]]
    assert rows.rot[:, : rows.n_kv].tolist() == [[7, 1, 20, 21, 40, 41], [0, 2, 20, 21, 40, 41]]
    assert (rows.n_past, rows.next_rot, rows.live.tolist()) == (7, 42, [6, 6])


@pytest.mark.parametrize("n", [1, 4])
def test_append_is_the_same_for_equal_and_ragged_rows(n):
    tables = []
    for ragged in (False, True):
        rows = Rows(np.zeros(3, np.int32), 8, ragged=ragged)
        for _ in range(2):
            rows.append(n)
        live = [array[:, : 2 * n].tolist() for array in (rows.pos, rows.rot)]
        tables.append((*live, rows.live.tolist(), rows.n_kv, rows.n_past))
    assert tables[0] == tables[1]
    assert tables[0][0] == [list(range(2 * n))] * 3


@pytest.mark.parametrize("seed", range(10))
def test_closing_gaps_puts_keys_at_the_number_of_older_tokens(seed):
    rng = np.random.default_rng(200 + seed)
    n = int(rng.integers(1, 50))
    pos, rot = (np.stack([rng.permutation(1000)[:n] for _ in range(4)]).astype(np.int32) for _ in range(2))
    rows = Rows(np.zeros(4, np.int32), n, ragged=False)
    rows.n_kv = n
    rows.put(np.full(4, n, np.int32), pos, rot)
    cells = np.tile(np.arange(n, dtype=np.int32), (4, 1))
    n_older = (pos[:, None, :] < pos[:, :, None]).sum(axis=2)
    assert (rot + deltas(rows, cells, rows.live, 100) == 100 - n + n_older).all()
