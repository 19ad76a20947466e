"""What docs/which-policy.md says: the papers' policies beside recall and quantized caches. No paper's."""

from __future__ import annotations

from commands import Compare, Eval, Run

from experiments.kinds import ALL, LARGE, SMALL, WIKI, XSUM, Experiment, Table

POLICIES = ("recall", "roco", "h2o", "bumblebee", "buzz", "weightedkv", "streamingllm")
# larger models are asked less, as they take longer
_FEWER = tuple(name for name in POLICIES if name not in ("bumblebee", "buzz", "weightedkv"))
_QUANTIZED = ("full q8_0", "full q4_0")
_TYPES = ("f16", "q8_0", "q4_0")
# two texts of each of four kinds
_TEXTS = {
    "books": ("pg19/10321.txt", "janeausten/emma.txt"),
    "articles": (WIKI, "paul_graham_essays/worked.txt"),
    "papers": ("arxiv/2404.15949.txt", "arxiv/2410.23079.txt"),
    "code": ("code/argparse.py", "code/llama-vocab.cpp"),
}
_FILES = tuple(file for files in _TEXTS.values() for file in files)
KINDS = {file.rpartition("/")[2]: kind for kind, files in _TEXTS.items() for file in files}
_SHARES = ("5%", "10%", "20%", "40%")


def _passkey(policies: tuple[str, ...], repeats: int, minutes: int, model: str = "") -> Eval:
    hidden = ("--set", "lengths=512", "--set", f"repeats={repeats}")
    return Eval("passkey", (), ("full", *policies), _SHARES, hidden, 5 * repeats, model, minutes=minutes)


def _qa(policies: tuple[str, ...], n: int, minutes: int, model: str = "") -> Eval:
    files, how = ("lost_in_the_middle/nq-open-oracle.jsonl.gz",), ("--set", "n_max=24")
    return Eval("qa", files, ("full", *policies), _SHARES, how, n, model, minutes=minutes)


def _summarize(policies: tuple[str, ...], n: int, minutes: int, model: str = "") -> Eval:
    how = ("--set", "likelihood=true")
    return Eval("summarize", (XSUM,), ("full", *policies), _SHARES, how, n, model, minutes=minutes)


_TASKS: dict[str, Run] = {
    "which-passkey": _passkey(POLICIES, 4, 38),
    "which-qa": _qa(POLICIES, 40, 54),
    "which-summarize": _summarize(POLICIES, 16, 25),
    "which-passkey-0.5b": _passkey(_FEWER, 2, 30, SMALL),
    "which-qa-0.5b": _qa(_FEWER, 20, 30, SMALL),
    "which-passkey-1.5b": _passkey(_FEWER, 2, 55, LARGE),
    "which-qa-1.5b": _qa(_FEWER, 12, 35, LARGE),
}

RUNS: dict[str, Run] = {
    "which-texts": Compare(_FILES, ("full", *POLICIES), ("512", "1024"), 3072, types=_TYPES, minutes=70),
    "which-texts-long": Compare(_FILES[::2], ("full", *_FEWER), ("2048", "4096"), 6144, minutes=45),
    "which-texts-0.5b": Compare(
        _FILES, ("full", *_FEWER), ("512",), 2048, model=SMALL, types=_TYPES, minutes=45
    ),
    "which-texts-1.5b": Compare(
        _FILES, ("full", *_FEWER), ("512",), 2048, model=LARGE, types=_TYPES, minutes=70
    ),
    **_TASKS,
}


def _task(title: str, task: str, score: str) -> Table:
    return Table("", ("budget",), "full", ("full", *POLICIES), scores={task: score}, title=title)


_SIZES = tuple(Table(score, rows=("full", *_QUANTIZED, *POLICIES)) for score in ("device", "host"))

EXPERIMENTS = {
    "which-texts": Experiment(
        ("which-texts", "which-texts-0.5b", "which-texts-1.5b"),
        (
            Table(
                *("above", ("of", "budget"), "h2o", (*_QUANTIZED, *POLICIES)),
                apart="full",
                names=KINDS,
                pooled=ALL,
            ),
            *_SIZES,
        ),
    ),
    "which-texts-long": Experiment(
        ("which-texts-long",),
        (
            Table(*("above", ("of", "budget"), "h2o", POLICIES), apart="full", names=KINDS, pooled=ALL),
            *_SIZES,
        ),
    ),
    "which-tasks": Experiment(
        tuple(_TASKS),
        (
            _task("Hidden numbers found, %", "passkey", "found"),
            _task("Log-probability of the right answer to a question, nats a token", "qa", "logp"),
            _task("Log-probability of a good summary, nats a token", "summarize", "logp"),
        ),
    ),
}
