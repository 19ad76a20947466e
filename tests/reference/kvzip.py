"""KVzip (arXiv:2505.23416): the token of the prompt goes that gets least where the prompt is repeated, one
at a time. A token that was repeated has its score in its notes; the others go last, the oldest first.
"""

import math

from . import keep_shared

CASES = [
    [],
    ["sinks=0"],
    ["window=5", "sinks=2"],
    ["chunk=7"],
    ["heads=adaptive"],
    ["heads=adaptive", "floor=0", "window=2", "sinks=3"],
    ["heads=adaptive", "floor=0.8", "chunk=7"],
]


def keep(rows, *, next, pinned, budget, slack, chunk, window, sinks, heads, floor):
    # rows that share hold twice the budget at most
    is_shared = heads == "adaptive"
    first, n_keep = max(sinks, pinned), budget // (2 if is_shared else 1) - slack
    recent = next - min(window, n_keep - first)
    scores = [{token["pos"]: token["notes"].get("score", math.inf) for token in row} for row in rows]
    if is_shared:
        return keep_shared(scores, first, recent, n_keep, floor, budget - slack)
    kept = []
    for score in scores:
        alive = list(score)
        while len(alive) > n_keep:
            alive.remove(
                min((pos for pos in alive if first <= pos < recent), key=lambda pos: (score[pos], pos))
            )
        kept.append(alive)
    return kept


def rehearse(stream, begin, end, asked, repeated):
    """Lets a stream repeat its tokens from position begin to end, and forget that it has.

    asked: the tokens that come before the repeated ones.
    """
    n, next, counter = stream.n, stream.next, stream.counter
    seen = {row: [len(own) for own in row.seen] for rows in stream.rows for row in rows}
    stream.decode([*asked, *repeated])
    for row, n_seen in seen.items():
        for i in range(n):
            new = row.seen[i][n_seen[i] :]
            if begin <= row.pos[i] < end:
                row.notes[i]["score"] = max(attention for _, heads in new for attention in heads)
        row.keep(row.pos[:n])
        row.seen = [own[:m] for own, m in zip(row.seen, n_seen, strict=True)]
    stream.next, stream.counter = next, counter
