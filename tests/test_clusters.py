"""Clusters of archived tokens are those of their definition."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import policies
from tests.running import open_engine, text

pytestmark = pytest.mark.engine

N_CLUSTER, N_ROUND, HEAD_DIM, N_HEAD = 16, 5, 32, 2


def kmeans(x):
    """i64[n]: which cluster each of x [n, d] is in: k-means that begins with points far apart.

    The first is the farthest from the mean, each next one the farthest from those before.
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


def test_clusters_begin_with_keys_that_are_far_apart(tiny_model):
    path = tiny_model(n_head_kv=N_HEAD, head_dim=HEAD_DIM, n_ctx_train=4096)
    with open_engine(path, policies.fit("recall", 48, 16), archive=4096, archive_type="f32") as engine:
        engine.read(text(1500))
        archive = engine.context.archive
        n = archive.n_token
        assert len(archive.clustered) > 3
        # the first block begins behind the sinks
        for begin, is_far in archive.clustered[1:]:
            assert not is_far
            halves = archive.read_clusters(begin, begin + n, is_far).reshape(-1, n // 2)
            found = np.stack([halves & 15, halves >> 4], axis=2).reshape(-1, n)
            keys = archive.read(begin, begin + n).view(np.float32).reshape(-1, n, N_HEAD, 2, HEAD_DIM)
            rows = keys[:, :, :, 0].swapaxes(1, 2).reshape(-1, n, HEAD_DIM).astype(float)
            for own, x in zip(found, rows, strict=True):
                # rounding may decide where two means are as near
                assert (own == kmeans(x)).mean() > 0.98
