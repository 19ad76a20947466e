"""Clusters of archived keys by definition, and attention that uses these clusters."""

from __future__ import annotations

import numpy as np

N_CLUSTER, N_ROUND, N_APART, MAX_VARIANCE = 16, 5, 5, 16.0


def kmeans(x):
    """Return i64[n]: the cluster of each point of x [n, d], by k-means.

    The first starting point is the point farthest from the mean of all points. Each further starting point is
    the point farthest from the starting points before it.
    """
    begin = [np.argmax(((x - x.mean(0)) ** 2).sum(1))]
    while len(begin) < N_CLUSTER:
        begin.append(((x[:, None] - x[begin]) ** 2).sum(2).min(1).argmax())
    means = x[begin]
    for _ in range(N_ROUND):
        of = ((x[:, None] - means) ** 2).sum(2).argmin(1)
        for c in np.unique(of):
            means[c] = x[of == c].mean(0)
    return of


class Clusters:
    """Clusters of a row's archive, computed for blocks of n_block tokens.

    exact: number of tokens that a one-token step attends to exactly.
    """

    def __init__(self, n_block, exact):
        self.n_block = n_block
        self.exact = exact
        self.known = {}

    def members(self, pos, keys, end, first_near):
        """Return i64[n]: the cluster of each entry; -1 if its block is not complete by position `end`.

        pos i64[n]: position in the stream. keys f64[n, d]: keys after rotation. All keys of a far block are
        rotated to the same distance from the query. first_near: first position of the near blocks. A block
        has the same clusters at every step, but gets new clusters when it becomes far.
        """
        res = np.full(len(pos), -1)
        for block in range(pos[0] // self.n_block, end // self.n_block):
            in_block = pos // self.n_block == block
            name = (block, block * self.n_block < first_near)
            if name not in self.known:
                self.known[name] = kmeans(keys[in_block])
            res[in_block] = block * N_CLUSTER + self.known[name]
        return res

    def gains(self, of, keys, queries):
        """Return f64[..., m]: for each query and cluster, how much the spread of the keys raises the logit.

        The gain is half of the variance of the keys' logits. It is estimated: the keys of all clusters are
        assumed to vary in the same proportions.
        of: result of `members`, for m clusters. keys f64[n, d]: keys with the rotation that their block had
        when it was clustered. queries f64[m, ..., d]: for each cluster, the queries with the rotation of its
        keys, multiplied by the scale of the logits.
        """
        names = np.unique(of[of >= 0])
        squares = [((keys[of == c] - keys[of == c].mean(0)) ** 2).sum(0) for c in names]
        spreads = [square.sum() / (of == c).sum() for c, square in zip(names, squares, strict=True)]
        blocks = [
            sum(square for c, square in zip(names, squares, strict=True) if c // N_CLUSTER == block)
            for block in np.unique(names // N_CLUSTER)
        ]
        shares = np.mean([block / block.sum() for block in blocks], axis=0)
        variances = [(query**2 @ shares) * spread for query, spread in zip(queries, spreads, strict=True)]
        return np.minimum(np.stack(variances, axis=-1), MAX_VARIANCE) / 2

    def attend(self, of, logits, gains, values, n_tokens):
        """Return logits f64[..., m] and values f64[m, d] that a step of n_tokens attends to.

        The step attends exactly to the clusters with the most attention per token, until these have enough
        tokens. Every other cluster becomes one entry: the mean key and the mean value of its tokens, weighted
        by the number of tokens. The logit of a mean key is the mean of the tokens' logits.
        of: result of `members`. logits f64[..., n]: logits of all entries. gains f64[..., c]: result of
        `gains`, added to the clusters' logits only to choose clusters.
        """
        names, inverse, size = np.unique(of[of >= 0], return_inverse=True, return_counts=True)
        share = np.zeros((len(of), len(names)))
        share[np.flatnonzero(of >= 0), inverse] = 1 / size[inverse]
        rough = logits @ share + np.log(size)
        ranks = rough + gains
        weight = np.exp(ranks - ranks.max(-1, keepdims=True))
        attention = (weight / weight.sum(-1, keepdims=True)).reshape(-1, len(names)).sum(0)

        best = np.argsort(-attention / size)
        before = np.cumsum(size[best]) - size[best]
        looked = best[before < self.exact * min(n_tokens, N_APART)]
        exact = (of < 0) | np.isin(of, names[looked])
        others = np.setdiff1d(np.arange(len(names)), looked)
        return (
            np.concatenate((logits[..., exact], rough[..., others]), axis=-1),
            np.concatenate((values[exact], share.T[others] @ values)),
        )
