"""What docs/which-policy.md says: the papers' policies beside recall and quantized caches. No paper's."""

from __future__ import annotations

from commands import Compare, Eval, Run

from experiments.kinds import ALL, LARGE, SMALL, WIKI, XSUM, Experiment, Table, each

POLICIES = ("recall", "roco", "h2o", "bumblebee", "buzz", "weightedkv", "streamingllm")
# larger models are asked less, as they take longer
_FEWER = tuple(name for name in POLICIES if name not in ("bumblebee", "weightedkv"))
_QUANTIZED = ("full q8_0", "full q4_0")
# two texts of each of four kinds
_TEXTS = {
    "books": ("pg19/10321.txt", "janeausten/emma.txt"),
    "articles": (WIKI, "paul_graham_essays/worked.txt"),
    "papers": ("arxiv/2404.15949.txt", "arxiv/2410.23079.txt"),
    "code": ("code/argparse.py", "code/llama-vocab.cpp"),
}
_FILES = tuple(file for files in _TEXTS.values() for file in files)
KINDS = {file.rpartition("/")[2]: kind for kind, files in _TEXTS.items() for file in files}
_TYPES = ("f16", "q8_0", "q4_0")
_SHARES = ("5%", "10%", "20%", "40%")


def _eval(
    task: str,
    files: tuple[str, ...],
    policies: tuple[str, ...],
    how: tuple[str, ...],
    n: int,
    model: str,
    rate: float,
) -> Eval:
    """A task at all shares. rate: minutes of twenty items with the first model."""
    slower = {"": 1, SMALL: 2, LARGE: 4}[model]
    minutes = round(rate * slower * n / 20 * (1 + len(policies) * len(_SHARES)))
    return Eval(task, files, ("full", *policies), _SHARES, how, n, model, minutes=minutes)


def _passkey(policies: tuple[str, ...], repeats: int, model: str = "") -> Eval:
    hidden = ("--set", "lengths=512", "--set", f"repeats={repeats}")
    return _eval("passkey", (), policies, hidden, 5 * repeats, model, 1.3)


def _qa(policies: tuple[str, ...], n: int, model: str = "") -> Eval:
    file = "lost_in_the_middle/nq-open-oracle.jsonl.gz"
    return _eval("qa", (file,), policies, ("--set", "n_max=24"), n, model, 0.4)


def _summarize(policies: tuple[str, ...], n: int, model: str = "") -> Eval:
    return _eval("summarize", (XSUM,), policies, ("--set", "likelihood=true"), n, model, 1.0)


_TASKS: dict[str, Run] = {
    "which-passkey": _passkey(POLICIES, 4),
    "which-qa": _qa(POLICIES, 40),
    "which-summarize": _summarize(POLICIES, 20),
    "which-passkey-0.5b": _passkey(_FEWER, 2, SMALL),
    "which-qa-0.5b": _qa(_FEWER, 20, SMALL),
    "which-summarize-0.5b": _summarize(_FEWER, 10, SMALL),
    "which-passkey-1.5b": _passkey(_FEWER, 2, LARGE),
    "which-qa-1.5b": _qa(_FEWER, 20, LARGE),
}

RUNS: dict[str, Run] = {
    "which-texts": Compare(_FILES, ("full", *POLICIES), ("512", "1024"), 4096, types=_TYPES, minutes=100),
    "which-texts-long": Compare(_FILES[::2], ("full", *POLICIES), ("2048", "4096"), 8192, minutes=60),
    "which-texts-0.5b": Compare(
        _FILES, ("full", *_FEWER), ("512",), 2048, model=SMALL, types=_TYPES, minutes=50
    ),
    "which-texts-1.5b": Compare(
        _FILES, ("full", *_FEWER), ("512",), 2048, model=LARGE, types=_TYPES, minutes=80
    ),
    **_TASKS,
}


def _task_table(title: str, task: str, score: str) -> Table:
    return Table("", ("budget",), "full", ("full", *POLICIES), scores={task: score}, title=title)


_SIZES = each("device", "host", rows=("full", *_QUANTIZED, *POLICIES))

EXPERIMENTS = {
    "which-texts": Experiment(
        ("which-texts", "which-texts-0.5b", "which-texts-1.5b"),
        (
            Table(
                *("above", ("of", "budget"), "h2o", (*_QUANTIZED, *POLICIES)),
                apart="full",
                names=KINDS,
                pooled=ALL,
                only_pooled=True,
            ),
            *_SIZES,
        ),
    ),
    "which-texts-long": Experiment(
        ("which-texts-long",),
        (Table("above", ("budget",), "h2o", POLICIES, apart="full"), *_SIZES),
    ),
    "which-tasks": Experiment(
        tuple(_TASKS),
        (
            _task_table("Hidden numbers found, %", "passkey", "found"),
            _task_table("Likelihood of the right answer to a question, nats a token", "qa", "logp"),
            _task_table("Likelihood of a right summary, nats a token", "summarize", "logp"),
        ),
    ),
}
