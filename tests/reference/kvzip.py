"""KVzip (arXiv:2505.23416): evict the prompt token that got the least attention when the prompt was repeated.

One token is evicted at a time. The notes of a prompt token hold its score. Tokens without a score are evicted
last, the oldest first.
"""

import math

import numpy as np

from . import ends, keep_ranked

CASES = [
    [],
    ["sinks=0"],
    ["window=5", "sinks=2"],
    ["chunk=7"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0", "window=2", "sinks=3"],
    ["heads=adaptive", "floor=0.8", "chunk=7"],
]


def keep(rows, *, chunk, **options):
    scores = [{token["pos"]: token["notes"].get("score", math.inf) for token in row} for row in rows]
    return keep_ranked(scores, ends(**options))


def reconstruct(stream, begin, end, prompt, repeated):
    """Let a stream repeat its tokens at positions [begin, end), note their scores, then rewind the stream.

    repeated: the tokens to repeat. prompt: the request to repeat them, which is decoded first.
    """
    n, next, counter = stream.n, stream.next, stream.counter
    rows = [row for rows in stream.rows for row in rows]
    n_step = [len(row.steps) for row in rows]
    stream.decode([*prompt, *repeated])
    for row, m in zip(rows, n_step, strict=True):
        # several layers may read a row
        score = np.max([attn[..., :n].max(axis=(0, 1)) for _, _, attn, _ in row.steps[m:]], axis=0)
        for i in np.flatnonzero((begin <= row.pos[:n]) & (row.pos[:n] < end)):
            row.notes[i]["score"] = float(score[i])
        row.steps = row.steps[:m]
        row.keep(row.pos[:n])
    stream.next, stream.counter = next, counter
