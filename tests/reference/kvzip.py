"""KVzip (arXiv:2505.23416): evict the prompt token that got the least attention when the prompt was repeated.

One token is evicted at a time. The notes of a prompt token hold its score. Tokens without a score are evicted
last, the oldest first.
"""

import math

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


def keep(rows, *, chunk, **how):
    scores = [{token["pos"]: token["notes"].get("score", math.inf) for token in row} for row in rows]
    return keep_ranked(scores, ends(**how))


def reconstruct(stream, begin, end, asked, repeated):
    """Let a stream repeat its tokens at positions [begin, end), note their scores, then rewind the stream.

    repeated: the tokens to repeat. asked: the request to repeat them, which is decoded first.
    """
    n, next, counter = stream.n, stream.next, stream.counter
    seen = {row: [len(queries) for queries in row.seen] for rows in stream.rows for row in rows}
    stream.decode([*asked, *repeated])
    for row, n_seen in seen.items():
        for i in range(n):
            new = row.seen[i][n_seen[i] :]
            if begin <= row.pos[i] < end:
                row.notes[i]["score"] = max(attention for _, heads in new for attention in heads)
        row.keep(row.pos[:n])
        row.seen = [queries[:m] for queries, m in zip(row.seen, n_seen, strict=True)]
    stream.next, stream.counter = next, counter
