"""Stand-in for the engine's cache. It shuffles cells, invents attention with many ties, and applies plans."""

from __future__ import annotations

import numpy as np

from kvtool.policy import PER_CELL, Signal, View


def view_of(pos, next_pos=None, pinned=0, **fields):
    """Return a View of one layer's rows.

    pos: positions of the cells' tokens, i[n] or i[row, n]; a single number n means range(n).
    fields: other fields of the View; a list is converted to f32[row, n].
    """
    pos = np.array(range(pos) if isinstance(pos, int) else pos, np.int32, ndmin=2)
    as_rows = {
        name: np.array(value, np.float32, ndmin=2) if isinstance(value, list) else value
        for name, value in fields.items()
    }
    return View(pos, np.zeros(len(pos), np.int32), next_pos or int(pos.max()) + 1, pinned, **as_rows)


def kept_positions(view, plan):
    """Return the sorted positions of the tokens that stay in each row."""
    return [sorted(pos[keep].tolist()) for pos, keep in zip(view.pos, plan.keep, strict=True)]


def kept_at_first(policy, view):
    """Return the positions of the tokens that a policy's first plan keeps in the first row."""
    state = policy.start(len(view.pos), view.n_kv, 0 if view.keys is None else view.keys.shape[2])
    policy.observe(view, state)
    return kept_positions(view, policy.plan(view, state))[0]


class Cache:
    """Fake cache. Its signals since the last plan are attributes with the names of View's fields.

    Attributes
    ----------
    pos
        i32[row, n_cell]: the position of each cell's token.
    live
        i32[row]: number of live cells, which are the first cells of the row. Its maximum is n_kv.
    state
        The policy's state.
    rows
        For each row, the records that the policy's twin (tests/reference) reads. The oldest token is first.
    n_value
        Number of different attention values. With fewer values, there are more ties.
    group
        Number of query heads of a row.
    n_dim
        Length of a key.
    twin
        True to fill `rows`. This takes most of the time.
    """

    def __init__(self, n_layer, n_head_kv, n_cell, policy, seed, *, n_value=4, group=2, n_dim=6, twin=True):
        self.layer = np.repeat(np.arange(n_layer, dtype=np.int32), n_head_kv)
        n_row = len(self.layer)
        self.pos = np.zeros((n_row, n_cell), np.int32)
        self.live = np.zeros(n_row, np.int32)
        self.policy = policy
        self.state = policy.start(n_row, n_cell, n_dim)
        self.rows = [[] for _ in range(n_row)]
        self.n_new = self.next = 0
        # attention of the last n_query queries, reduced over the heads of the group
        self.queries = np.zeros((0, n_row, n_cell), np.float32)
        self.rng = np.random.default_rng(seed)
        self.n_value = n_value
        self.twin = twin
        self.group = group
        self.n_dim = n_dim

    @property
    def n_kv(self):
        return int(self.live.max())

    def grow(self, n_token):
        """Shuffle the old cells, append tokens in one step, and make up attention and keys."""
        self.shuffle()
        steps = np.arange(self.next, self.next + n_token)
        n_seen = 1 + (steps if self.policy.t == "stream" else self.n_kv + np.arange(n_token))
        for row, live in enumerate(self.live):
            self.pos[row, live : live + n_token] = steps
        self.live += n_token
        self.keys = self.rng.integers(-2, 3, (len(self.rows), n_token, self.n_dim)).astype(np.float32)
        attention = self._attention(steps)
        self.n_new, self.next = n_token, self.next + n_token
        self._reduce(attention, n_seen, steps)
        if self.looks_ahead:
            self._look_ahead()
        if self.twin:
            self._record(attention, n_seen, steps)

    @property
    def looks_ahead(self):
        """True if the policy reads a signal that `_look_ahead` makes up."""
        return bool(self.policy.reads & (Signal.FUTURE | Signal.VALUE_NORMS))

    def _look_ahead(self):
        """Make up the means and variances of future logits, and the norms of values."""
        shape = len(self.rows), self.group, self.n_kv
        self.future_mean, self.future_variance = (
            (self.rng.integers(low, self.n_value, shape) / 4).astype(np.float32) for low in (-self.n_value, 0)
        )
        self.value_norms = (self.rng.integers(0, 2 * self.n_value, shape[::2]) / 8).astype(np.float32)

    def _record(self, attention, n_seen, steps):
        """Add the new tokens to `rows`, and update the record of every token."""
        looks_ahead, n_seen, begin = self.looks_ahead, n_seen.tolist(), int(steps[0])
        for number, row in enumerate(self.rows):
            row += [
                {
                    "pos": pos,
                    "mass": 0.0,
                    "last": 0.0,
                    "seen": [],
                    "key": key,
                    "old": False,
                    "row": number,
                    "notes": {},
                }
                for pos, key in zip(steps.tolist(), self.keys[number].tolist(), strict=True)
            ]
            cell_of = {pos: cell for cell, pos in enumerate(self.pos[number, : self.live[number]].tolist())}
            # for each cell and query: the attention of each head
            heads = np.ascontiguousarray(attention[number].T)
            mass = attention[number].sum(axis=(0, 1)).tolist()
            last = attention[number, :, -1].sum(axis=0).tolist()
            if looks_ahead:
                future = np.stack((self.future_mean[number], self.future_variance[number])).T.tolist()
                norms = self.value_norms[number].tolist()
            for token in row:
                cell = cell_of[token["pos"]]
                token["mass"] += mass[cell]
                token["last"] = last[cell]
                if looks_ahead:
                    token["future"], token["value_norm"] = future[cell], norms[cell]
                first = max(token["pos"] - begin, 0)
                token["seen"] += zip(n_seen[first:], heads[cell, first:].tolist(), strict=True)

    def shuffle(self):
        """Shuffle the cells of every row, and their signals. New cells stay behind old cells."""
        chance = self.rng.random((len(self.rows), self.n_kv))
        cell = np.arange(self.n_kv)
        chance[cell >= self.live[:, None] - self.n_new] += 1
        chance[cell >= self.live[:, None]] += 1 + cell[-1:].sum()
        order = chance.argsort(axis=1)
        self.pos[:, : self.n_kv] = np.take_along_axis(self.pos, order, axis=1)
        self.policy.move(self.state, order)
        live = self.queries[..., : self.n_kv]
        live[:] = np.take_along_axis(live, order[None], axis=2)
        if self.n_new:
            for name in PER_CELL.values():
                setattr(self, name, np.take_along_axis(getattr(self, name), order, axis=1))
            new = self.live[:, None] - self.n_new + np.arange(self.n_new)
            new = np.take_along_axis(order, new, axis=1) - (self.live[:, None] - self.n_new)
            self.keys = np.take_along_axis(self.keys, new[..., None], axis=1)
            if self.looks_ahead:
                for name in ("future_mean", "future_variance"):
                    setattr(self, name, np.take_along_axis(getattr(self, name), order[:, None], axis=2))
                self.value_norms = np.take_along_axis(self.value_norms, order, axis=1)

    def view(self, pinned=0, held=0):
        """Return the policy's view, with only the signals that it reads."""
        signals = {
            name: getattr(self, name) for signal, name in PER_CELL.items() if signal in self.policy.reads
        }
        keys = self.keys if Signal.KEYS in self.policy.reads else None
        live = self.live.copy() if self.policy.ragged else None
        if Signal.FUTURE in self.policy.reads:
            signals |= {name: getattr(self, name) for name in ("future_mean", "future_variance")}
        if Signal.VALUE_NORMS in self.policy.reads:
            signals["value_norms"] = self.value_norms
        if self.policy.reads & (Signal.HITS | Signal.FUTURE):
            signals["n_head"] = np.full(len(self.rows), self.group, np.int32)
        return View(
            self.live_pos(), self.layer, self.next, pinned, self.n_new, live, held, keys=keys, **signals
        )

    def plan(self, pinned=0, held=0):
        """Let the policy observe the view, which changes the policy's state. Return (view, plan)."""
        view = self.view(pinned, held)
        self.policy.observe(view, self.state)
        return view, self.policy.plan(view, self.state)

    def live_pos(self):
        """Return positions i32[row, n_kv], C-contiguous, with -1 for cells that are not live."""
        pos = self.pos[:, : self.n_kv].copy()
        pos[np.arange(self.n_kv) >= self.live[:, None]] = -1
        return pos

    def apply(self, keep):
        """Remove all cells that are not in `keep`.

        The n kept cells of a row become its first n cells: kept cells from index n on move, in order, into
        the holes below n. All cells from index n on become zero.
        """
        n_keep = keep.sum(axis=1)
        source = np.tile(np.arange(n_keep.max()), (len(keep), 1))
        for row, (keep_row, n) in enumerate(zip(keep, n_keep, strict=True)):
            holes = np.flatnonzero(~keep_row[:n])
            source[row, holes] = n + np.flatnonzero(keep_row[n:])
            stays = set(self.pos[row, : self.n_kv][keep_row].tolist())
            self.rows[row] = [token for token in self.rows[row] if token["pos"] in stays]
        self.pos[:, : source.shape[1]] = np.take_along_axis(self.pos, source, axis=1)
        self.queries[..., : source.shape[1]] = np.take_along_axis(self.queries, source[None], axis=2)
        self.policy.move(self.state, source)
        for row, n in enumerate(n_keep):
            for array in (self.pos, *self.state):
                array[row, n:] = 0
            self.queries[:, row, n:] = 0
        self.live = n_keep.astype(np.int32)
        self.n_new = 0

    def _attention(self, steps):
        """Return attention f32[row, head, query, cell], with 0 for cells that a query cannot see."""
        # values are multiples of a power of 1/2, so their float32 sums are exact in any order
        shape = (len(self.rows), self.group, len(steps), self.n_kv)
        values = self.rng.integers(0, self.n_value, shape)
        attention = (values / 2 ** (self.n_value - 1).bit_length()).astype(np.float32)
        pos = self.live_pos()[:, None, None]
        return np.where((pos > steps[:, None]) | (pos < 0), np.float32(0), attention)

    def _reduce(self, attention, n_seen, steps):
        """Set the signals by their definitions. seen i64[query]: number of tokens that a query has seen."""
        important = attention * n_seen[:, None] >= 1
        of_group = {
            "sum": attention.sum(axis=1),
            "max": attention.max(axis=1),
            "first": attention[:, 0],
        }[self.policy.group]
        self.attn = of_group.sum(axis=1)
        self.last = of_group[:, -1].copy()
        new = np.zeros((len(steps), *self.queries.shape[1:]), np.float32)
        new[..., : self.n_kv] = of_group.swapaxes(0, 1)
        self.queries = np.concatenate([self.queries, new])[-max(self.policy.n_query, 1) :]
        self.recent = self.queries[..., : self.n_kv].sum(axis=0)
        self.highest = attention.max(axis=(1, 2))
        self.squares = (of_group**2).sum(axis=1)
        self.hits = important.sum(axis=(1, 2)).astype(np.float32)
        self.important = (important.any(axis=1) * (steps[:, None] + 1)).max(axis=1).astype(np.int32)
