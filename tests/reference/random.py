"""Random: evict the token with the lowest hash outside window and sinks, one at a time."""

from . import ends, keep_ranked

CASES = [[], ["window=1", "sinks=2", "seed=7"], ["window=0", "seed=-1"]]


def keep(rows, *, next, seed, **options):
    scores = [
        {token["pos"]: hash_of(seed, next, token["row"], token["pos"]) >> 40 for token in row} for row in rows
    ]
    return keep_ranked(scores, ends(next=next, **options))


def hash_of(*numbers):
    state = 0
    for number in numbers:
        state = splitmix64((state + number) % 2**64)
    return state


def splitmix64(x):
    """Return the output of SplitMix64 in state x (from its authors: prng.di.unimi.it/splitmix64.c)."""
    z = (x + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)
