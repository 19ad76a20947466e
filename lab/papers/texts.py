"""The texts that the experiments read: files of the folder with the texts and data sets."""

from __future__ import annotations

from pathlib import Path

BOOKS = ("pg19/10146.txt", "pg19/10321.txt", "janeausten/emma.txt", "janeausten/persuasion.txt")
PAPERS = tuple(f"arxiv/{name}.txt" for name in ("2404.15949", "2410.23079", "2503.01330", "bumblebee"))
CHAPTERS = tuple(f"proofpile/hott-{name}.tex" for name in ("basics", "hlevels", "logic", "reals"))
WIKI = "wikitext2/wiki.test.raw"
XSUM = "xsum/xsum_0shot_first300.jsonl"
LONGBENCH = "longbench/minilongbench_en.jsonl"

TWELVE = (*BOOKS, *CHAPTERS, *PAPERS)
"""Texts of three kinds. Each text is a unit of the tests."""

EIGHT = (*BOOKS, *PAPERS)
"""Fewer texts, for slower models.

With eight texts the lowest possible p is 2^-7. This is low enough for a significant result among six tests
(Holm).
"""

FOUR_KINDS = {
    "books": ("pg19/10321.txt", "janeausten/emma.txt"),
    "articles": (WIKI, "paul_graham_essays/worked.txt"),
    "papers": ("arxiv/2404.15949.txt", "arxiv/2410.23079.txt"),
    "code": ("code/argparse.py", "code/llama-vocab.cpp"),
}
"""Two texts of each of four kinds."""

DATA_SETS = {
    Path(file).name: kind
    for kind, files in {"PG19": BOOKS, "ProofPile": CHAPTERS, "ArXiv": PAPERS}.items()
    for file in files
}
"""The papers' data set that each of the twelve texts represents."""

_SETS = {
    TWELVE: "the twelve texts",
    EIGHT: "the eight texts",
    tuple(file for files in FOUR_KINDS.values() for file in files): "eight texts of four kinds",
}


def listed(files: tuple[str, ...]) -> str:
    """Return the names of these texts. For a set that many commands read, return the name of the set instead.

    lab/papers/README.md explains the names of sets.
    """
    return _SETS.get(files) or ", ".join(Path(file).name for file in files)
