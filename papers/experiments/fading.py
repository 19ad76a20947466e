"""What papers/fading.md says: rows that keep means of what they evict. No paper's."""

from __future__ import annotations

from papers.commands import Fading, Run
from papers.experiments.kinds import ALL, WIKI, Experiment, Table

_FOUR = (WIKI, "pg19/10321.txt", "pg19/10146.txt", "proofpile/hott-basics.tex")
_EIGHT = (
    *_FOUR,
    "janeausten/emma.txt",
    "paul_graham_essays/worked.txt",
    "proofpile/hott-reals.tex",
    "code/argparse.py",
)
_NAMES = {
    "wiki.test.raw": "wikitext-2",
    "10321.txt": "PG19 10321",
    "10146.txt": "PG19 10146",
    "hott-basics.tex": "HoTT basics",
    "emma.txt": "Emma",
    "worked.txt": "essay",
    "hott-reals.tex": "HoTT reals",
    "argparse.py": "Python",
}
_POLICIES = ("h2o", "roco")
_FEWER_QUERIES = ("roco+16:output:4", "roco+16:cells:4")
_WAYS = ("h2o+16:next", "h2o+16:near", "h2o+16:cosine", "h2o+16:age")
_WINDOW = ("streamingllm", "streamingllm+64:cells", "streamingllm+64", "streamingllm+64:spare")


def _rules(policy: str, n_mean: int, *more: str) -> tuple[str, ...]:
    """The policy alone, with the bytes of means as cells, with means, and with tokens in their place."""
    means = f"{policy}+{n_mean}"
    return policy, f"{means}:cells", means, *(f"{means}:{name}" for name in more)


_SMALL = tuple(rule for policy in _POLICIES for rule in _rules(policy, 16, "spare"))
_LARGE = tuple(rule for policy in _POLICIES for rule in _rules(policy, 32))

RUNS: dict[str, Run] = {
    "fading-512": Fading(_FOUR, ("full", *_LARGE), 512, 4096, minutes=11),
    "fading": Fading(_EIGHT, ("full", *_SMALL, *_FEWER_QUERIES), 128, 2048, minutes=12),
    "fading-ways": Fading(_FOUR, (*_WINDOW, *_WAYS), 128, 2048, minutes=5),
}

_BY_TEXT = {"by": ("of",), "names": _NAMES, "pooled": ALL}
_TESTED = _BY_TEXT | {"only_pooled": True}
_BYTES = "Keys, values, means and kept queries of all rows, MiB"


def _of(policy: str, n_mean: int, *more: str, score: str = "nll", **how: object) -> Table:
    rules = _rules(policy, n_mean, *more)
    return Table(score, **_TESTED | how, against=rules[2], rows=("full", *rules))


EXPERIMENTS = {
    "fading": Experiment(
        ("fading",),
        (
            *(_of(policy, 16, "spare") for policy in _POLICIES),
            Table("nll", **_TESTED, against=_FEWER_QUERIES[0], rows=("roco", *_FEWER_QUERIES)),
            Table("device", title=_BYTES, rows=("full", *_SMALL, *_FEWER_QUERIES)),
        ),
    ),
    "fading-512": Experiment(
        ("fading-512",),
        (
            Table("above", **_BY_TEXT, apart="full", rows=_LARGE),
            Table("nll", **_BY_TEXT, rows=("full", *_LARGE)),
            Table("device", title=_BYTES, rows=("full", *_LARGE)),
        ),
    ),
    "fading-ways": Experiment(
        ("fading-ways",),
        (Table("nll", **_BY_TEXT, rows=(*_WAYS, *_WINDOW)),),
    ),
}
