"""Clusters of archived tokens equal the clusters of the reference."""

from __future__ import annotations

import numpy as np

from kvtool import policies
from tests.engine.exact_engines import open_engine, random_tokens
from tests.reference.clusters import kmeans

HEAD_DIM, N_HEAD = 32, 2


def test_clusters_equal_those_of_the_reference(tiny_model):
    path = tiny_model(n_head_kv=N_HEAD, head_dim=HEAD_DIM, n_ctx_train=4096)
    with open_engine(path, policies.fit("recall", 48, 16), archive=4096, archive_type="f32") as engine:
        engine.read(random_tokens(1500))
        archive = engine.context.archive
        n = archive.n_block
        assert len(archive.clustered) > 3
        # the first block is left out: it is incomplete, because sinks are not archived
        for begin, is_far in archive.clustered[1:]:
            assert not is_far
            halves = archive.read_clusters(begin, begin + n, is_far).reshape(-1, n // 2)
            labels = np.stack([halves & 15, halves >> 4], axis=2).reshape(-1, n)
            keys = archive.read(begin, begin + n).view(np.float32).reshape(-1, n, N_HEAD, 2, HEAD_DIM)
            rows = keys[:, :, :, 0].swapaxes(1, 2).reshape(-1, n, HEAD_DIM).astype(float)
            for row_labels, x in zip(labels, rows, strict=True):
                # if a key is equally near to two means, rounding decides between their clusters
                assert (row_labels == kmeans(x)).mean() > 0.98
