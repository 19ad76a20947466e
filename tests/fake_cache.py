"""A cache in NumPy: shuffled cells, made-up attention full of ties, and what an engine does with a plan."""

from __future__ import annotations

import numpy as np

from kvtool.policy import SIGNALS, Signal, View


class Cache:
    """pos i32[row, n_cell] and a policy's state; the first n_kv cells live.

    rows: for each row the records that a twin reads, oldest first. n_value: how many values attention takes.
    group: query heads of a row. n_dim: length of a key. The signals since the last plan are those of a View.
    """

    def __init__(self, n_layer, n_head_kv, n_cell, policy, seed, *, n_value=4, group=2, n_dim=6):
        self.layer = np.repeat(np.arange(n_layer, dtype=np.int32), n_head_kv)
        n_row = len(self.layer)
        self.pos = np.zeros((n_row, n_cell), np.int32)
        self.policy = policy
        self.state = policy.start(n_row, n_cell, n_dim)
        self.rows = [[] for _ in range(n_row)]
        self.n_kv = self.n_new = self.next = 0
        self.rng = np.random.default_rng(seed)
        self.n_value = n_value
        self.group = group
        self.n_dim = n_dim

    def grow(self, n_token):
        """Appends tokens in one step, deals the old cells anew, and makes up attention and keys."""
        self.shuffle()
        begin, end = self.n_kv, self.n_kv + n_token
        steps = np.arange(self.next, self.next + n_token)
        self.pos[:, begin:end] = steps
        self.keys = self.rng.integers(-2, 3, (len(self.rows), n_token, self.n_dim)).astype(np.float32)
        attention = self._attention(n_token, end)
        self.n_kv, self.n_new, self.next = end, n_token, self.next + n_token
        self._reduce(attention, steps + 1)
        for number, row in enumerate(self.rows):
            row += [
                {
                    "pos": int(pos),
                    "mass": 0.0,
                    "last": 0.0,
                    "seen": [],
                    "key": self.keys[number, i].tolist(),
                    "old": False,
                    "row": number,
                    "notes": {},
                }
                for i, pos in enumerate(steps)
            ]
            cell_of = {int(self.pos[number, cell]): cell for cell in range(end)}
            for token in row:
                mine = attention[number, :, :, cell_of[token["pos"]]]
                token["mass"] += float(mine.sum())
                token["last"] = float(mine[:, -1].sum())
                token["seen"] += [
                    (int(step) + 1, mine[:, i].tolist())
                    for i, step in enumerate(steps)
                    if step >= token["pos"]
                ]

    def shuffle(self):
        """Deals every row's cells anew, the new ones among themselves, and all that is known of them."""
        chance = self.rng.random((len(self.rows), self.n_kv))
        chance[:, self.n_kv - self.n_new :] += 1
        order = chance.argsort(axis=1)
        self.pos[:, : self.n_kv] = np.take_along_axis(self.pos, order, axis=1)
        self.policy.move(self.state, order)
        if self.n_new:
            for name in SIGNALS.values():
                setattr(self, name, np.take_along_axis(getattr(self, name), order, axis=1))
            new = order[:, self.n_kv - self.n_new :] - (self.n_kv - self.n_new)
            self.keys = np.take_along_axis(self.keys, new[..., None], axis=1)

    def view(self, pinned=0):
        """What the policy sees, with no more signals than it reads."""
        signals = {
            name: getattr(self, name) for signal, name in SIGNALS.items() if signal in self.policy.reads
        }
        keys = self.keys if Signal.KEYS in self.policy.reads else None
        return View(self.live(), self.layer, self.next, pinned, keys=keys, **signals)

    def plan(self, pinned=0):
        """(view, plan), with the state as they leave it."""
        view = self.view(pinned)
        self.policy.observe(view, self.state)
        return view, self.policy.plan(view, self.state)

    def live(self):
        """pos i32[row, n_kv], C-contiguous."""
        return self.pos[:, : self.n_kv].copy()

    def apply(self, keep):
        """Fills the holes among the first cells with kept cells of the tail, and zeroes the rest."""
        n_keep = int(keep[0].sum())
        source = np.tile(np.arange(n_keep), (len(keep), 1))
        for row, kept in enumerate(keep):
            source[row, ~kept[:n_keep]] = n_keep + np.flatnonzero(kept[n_keep:])
            stays = set(self.pos[row, : self.n_kv][kept].tolist())
            self.rows[row] = [token for token in self.rows[row] if token["pos"] in stays]
        self.pos[:, :n_keep] = np.take_along_axis(self.pos, source, axis=1)
        self.policy.move(self.state, source)
        for array in (self.pos, *self.state):
            array[:, n_keep:] = 0
        self.n_kv, self.n_new = n_keep, 0

    def _attention(self, n_token, n_kv):
        """f32[row, head, query, cell]"""
        # eighths and the like: sums of them are exact, whatever their order
        shape = (len(self.rows), self.group, n_token, n_kv)
        values = self.rng.integers(0, self.n_value, shape)
        attention = (values / 2 ** (self.n_value - 1).bit_length()).astype(np.float32)
        query = self.next + np.arange(n_token)
        return np.where(self.pos[:, None, None, :n_kv] > query[:, None], np.float32(0), attention)

    def _reduce(self, attention, seen):
        """The signals by their definitions; seen i64[query]: the tokens that each query has seen."""
        important = attention * seen[:, None] >= 1
        of_group = {
            "sum": attention.sum(axis=1),
            "max": attention.max(axis=1),
            "first": attention[:, 0],
        }[self.policy.group]
        self.attn = of_group.sum(axis=1)
        self.last = of_group[:, -1].copy()
        self.recent = of_group[:, -max(self.policy.n_query, 1) :].sum(axis=1)
        self.squares = (of_group**2).sum(axis=1)
        self.hits = important.sum(axis=(1, 2)).astype(np.float32)
        self.important = (important.any(axis=1) * seen[:, None]).max(axis=1).astype(np.int32)
