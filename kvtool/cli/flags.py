"""The options that several commands share. Where the default is None, show_default says what that means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvtool.cli import completion as of
from kvtool.cli.command import ARCHIVES, DRAWS, KEEPS, RUNS, SHOWS
from kvtool.errors import UsageError

N_BATCH = 256
"""Default of --batch-size in a chat and wherever a prompt is read."""

N_TEXT_BATCH = 64
"""Default of --batch-size of the commands that stream a text: no batch goes over the budget there."""

POLICY = "h2o"
"""Default of --policy: best or second best on three texts with 512 and 1,024 cells, and without an end."""

ANSWERING = "recall"
"""Default where an answer about a text is asked for: what was read must be found again."""


def check_cache_types(type_k: str, type_v: str) -> None:
    """Raises UsageError for types that llama.cpp does not have for cached keys or values."""
    from kvtool.models.layers import CACHE_TYPES

    for flag, kind in (("-ctk", type_k), ("-ctv", type_v)):
        if kind not in CACHE_TYPES:
            raise UsageError(f"{flag} must be one of {', '.join(CACHE_TYPES)}, got {kind!r}")


def _no_limit(value: int | None) -> int | None:
    """-1 is no limit, as in llama.cpp."""
    if value == 0:
        raise typer.BadParameter("0 writes nothing; give at least 1, or -1 for no limit")
    return None if value == -1 else value


def lower(value: str) -> str:
    """A cache type as llama.cpp spells it: model files and its documents have both Q8_0 and q8_0."""
    return value.lower()


def _all_for(wanted: int) -> Callable[[int | None], int | None]:
    """The number that stands for the default, as in llama.cpp."""
    return lambda value: None if value == wanted else value


# which tokens stay

Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Eviction policy: which tokens stay in the cache. A name (kvtool policies) or a Python file.",
        rich_help_panel=KEEPS,
        autocompletion=of.policies,
    ),
]


def _budget(default: str) -> Any:
    return typer.Option(
        "--budget",
        metavar="SIZE",
        help="Cache size: tokens kept per KV head (512), share of the trained context (10%, rounded down), "
        "or bytes (64M or 64MiB).",
        show_default=default,
        rich_help_panel=KEEPS,
    )


Budget = Annotated[str | None, _budget("1,024 tokens")]

TextBudget = Annotated[str | None, _budget("512 tokens")]
"""--budget of the commands that stream a text."""

Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--option",
        metavar="NAME=VALUE",
        help="Set a parameter of the policy (kvtool policies lists them). Repeatable.",
        show_default=False,
        rich_help_panel=KEEPS,
        autocompletion=of.parameters,
    ),
]

EvictEvery = Annotated[
    int | None,
    typer.Option(
        "--evict-every",
        min=1,
        metavar="N",
        help="Tokens from one eviction to the next.",
        show_default="16, fewer for budgets below 128",
        rich_help_panel=KEEPS,
    ),
]

Positions = Annotated[
    str,
    typer.Option(
        "--positions",
        metavar="MODE",
        help="Positions of the kept tokens: original, in-cache (renumbered without gaps), or auto (original; "
        "renumbered whenever the trained context is full).",
        rich_help_panel=KEEPS,
        autocompletion=of.positions,
    ),
]

Prefill = Annotated[
    str | None,
    typer.Option(
        "--prefill",
        metavar="MODE",
        help="How to read a prompt longer than the budget: stream (evict after each batch) or whole (decode "
        "all of it, then evict once).",
        show_default="the policy's own",
        rich_help_panel=KEEPS,
        autocompletion=of.prefills,
    ),
]

# the model, and how it runs

Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="MODEL",
        help="A name (kvtool models list), a GGUF file, its URL, or hf:OWNER/REPO[:QUANT].",
        show_default="{model}",
        rich_help_panel=RUNS,
        autocompletion=of.models,
    ),
]

Context = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        min=0,
        metavar="N",
        help="Context length, at most the trained length (also 0); with `full`, also the cache size.",
        show_default="the model's trained length",
        rich_help_panel=RUNS,
        callback=_all_for(0),
    ),
]


def _batch(default: int) -> Any:
    return typer.Option(
        "-b",
        "--batch-size",
        min=1,
        metavar="N",
        help="Maximum tokens decoded per batch.",
        show_default=str(default),
        rich_help_panel=RUNS,
    )


Batch = Annotated[int | None, _batch(N_BATCH)]

TextBatch = Annotated[int | None, _batch(N_TEXT_BATCH)]
"""--batch-size of the commands that stream a text."""

Threads = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        min=1,
        metavar="N",
        help="CPU threads.",
        show_default="as many as are fastest, one per core at most",
        rich_help_panel=RUNS,
    ),
]

GpuLayers = Annotated[
    int | None,
    typer.Option(
        "-ngl",
        "--gpu-layers",
        min=-1,
        metavar="N",
        help="Layers on the GPU.",
        show_default="all",
        rich_help_panel=RUNS,
        callback=_all_for(-1),
    ),
]

Rpc = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Spread layers and cache over these machines, which run kvtool worker.",
        rich_help_panel=RUNS,
    ),
]

TypeK = Annotated[
    str,
    typer.Option(
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help="Type of the cached keys: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0.",
        rich_help_panel=KEEPS,
        autocompletion=of.cache_types,
        callback=lower,
    ),
]

TypeV = Annotated[
    str,
    typer.Option(
        "-ctv",
        "--cache-type-v",
        metavar="TYPE",
        help="Type of the cached values, as for keys.",
        rich_help_panel=KEEPS,
        autocompletion=of.cache_types,
        callback=lower,
    ),
]

Archive = Annotated[
    str | None,
    typer.Option(
        "--archive",
        metavar="SIZE",
        help="With --policy recall: the most tokens (20000) or bytes (2GiB) archived.",
        show_default="half of the free memory; of the disk's free space with --archive-file",
        rich_help_panel=ARCHIVES,
    ),
]

ArchiveFile = Annotated[
    str | None,
    typer.Option(
        "--archive-file",
        metavar="PATH",
        help="With --policy recall: keep the archive in a new file on this machine, not in host memory. "
        "The file loses its name at once, and its space is free again when kvtool ends.",
        show_default="host memory",
        rich_help_panel=ARCHIVES,
    ),
]

ArchiveType = Annotated[
    str,
    typer.Option(
        "--archive-type",
        metavar="TYPE",
        help="With --policy recall: type of the archived keys and values, as for -ctk.",
        rich_help_panel=ARCHIVES,
        autocompletion=of.cache_types,
        callback=lower,
    ),
]

Flash = Annotated[
    str,
    typer.Option(
        "-fa",
        "--flash-attn",
        metavar="MODE",
        help="Flash attention: on, off or auto.",
        rich_help_panel=RUNS,
        autocompletion=of.on_off_auto,
    ),
]

# how tokens are drawn; the defaults are llama.cpp's, but for the temperature of an answer

TEMP, TOP_K, TOP_P, MIN_P = 0.8, 40, 0.95, 0.05

ANSWERING_TEMP = 0.4
"""Default of generate's --temp: at 0.8 fewer questions are answered right (docs/sampling.md)."""

Temp = Annotated[
    float,
    typer.Option(
        "--temp",
        metavar="T",
        help="Temperature; 0 always takes the likeliest token.",
        rich_help_panel=DRAWS,
    ),
]

TopK = Annotated[
    int,
    typer.Option(
        "--top-k",
        metavar="K",
        help="Draw from the K likeliest tokens; 0 means from all.",
        rich_help_panel=DRAWS,
    ),
]

TopP = Annotated[
    float,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Draw from the likeliest tokens whose probabilities add up to P.",
        rich_help_panel=DRAWS,
    ),
]

MinP = Annotated[
    float,
    typer.Option(
        "--min-p",
        metavar="P",
        help="Drop tokens less likely than P times the likeliest.",
        rich_help_panel=DRAWS,
    ),
]

RepeatPenalty = Annotated[
    float,
    typer.Option(
        "--repeat-penalty",
        metavar="X",
        help="Make recently used tokens less likely; 1 means off.",
        rich_help_panel=DRAWS,
    ),
]

Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=-1,
        metavar="N",
        help="Seed for drawing tokens.",
        show_default="random",
        rich_help_panel=DRAWS,
        callback=_all_for(-1),
    ),
]


def _predict(what: str) -> Any:
    return typer.Option(
        "-n",
        "--predict",
        "--n-predict",
        min=-1,
        metavar="N",
        help=f"Maximum tokens of {what}; -1 means no limit.",
        show_default="no limit",
        rich_help_panel=DRAWS,
        callback=_no_limit,
    )


Predict = Annotated[int | None, _predict("the answer")]

ReplyPredict = Annotated[int | None, _predict("a reply")]

# what is read

System = Annotated[str | None, typer.Option("--system", help="System prompt; it is never evicted.")]

SystemFile = Annotated[
    str | None, typer.Option("--system-file", metavar="FILE", help="Read the system prompt from this file.")
]

# what is said

Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="First say on stderr how the budget is split and what will happen.",
        rich_help_panel=SHOWS,
    ),
]

Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        help="Show statistics on stderr, and where a policy of your own failed; -vv: llama.cpp's log too.",
        rich_help_panel=SHOWS,
        count=True,
        show_default=False,
    ),
]

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON.",
        rich_help_panel=SHOWS,
    ),
]
