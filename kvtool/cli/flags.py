"""The options that several commands share. Where the default is None, show_default says what that means."""

from __future__ import annotations

from typing import Annotated, Any

import typer

N_BATCH = 256
"""Default of --batch-size in a chat and wherever a prompt is read."""

N_TEXT_BATCH = 64
"""Default of --batch-size of the commands that stream a text: no batch goes over the budget there."""

POLICY = "h2o"
"""Default of --policy: best or second best on three texts with 512 and 1,024 cells, and without an end."""

# which tokens stay

Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Eviction policy: which tokens stay in the cache. A name (kvtool policies) or a Python file.",
    ),
]


def _budget(default: str) -> Any:
    return typer.Option(
        "--budget",
        metavar="SIZE",
        help="Cache size: tokens kept per KV head (512), share of the trained context (10%, rounded down), "
        "or bytes (64MiB).",
        show_default=default,
    )


Budget = Annotated[str | None, _budget("1024")]

TextBudget = Annotated[str | None, _budget("512")]
"""--budget of the commands that stream a text."""

Options = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        metavar="NAME=VALUE",
        help="Set a parameter of the policy (kvtool policies lists them). Repeatable.",
        show_default=False,
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
    ),
]

Positions = Annotated[
    str,
    typer.Option(
        "--positions",
        metavar="MODE",
        help="Positions of the kept tokens: original, in-cache (renumbered without gaps), or auto (original; "
        "renumbered whenever the trained context is full).",
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
        show_default="$KVTOOL_MODEL, or the first name listed",
    ),
]

Context = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        min=1,
        metavar="N",
        help="Context length; with `full`, also the cache size.",
        show_default="trained length",
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
    )


Batch = Annotated[int | None, _batch(N_BATCH)]

TextBatch = Annotated[int | None, _batch(N_TEXT_BATCH)]
"""--batch-size of the commands that stream a text."""

Threads = Annotated[
    int | None,
    typer.Option("-t", "--threads", min=1, metavar="N", help="CPU threads.", show_default="one per core"),
]

GpuLayers = Annotated[
    int | None,
    typer.Option("-ngl", "--gpu-layers", min=0, metavar="N", help="Layers on the GPU.", show_default="all"),
]

Rpc = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Spread layers and cache over these machines, which run kvtool worker.",
    ),
]

TypeK = Annotated[
    str,
    typer.Option(
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help="Type of the cached keys: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0.",
    ),
]

TypeV = Annotated[
    str,
    typer.Option("-ctv", "--cache-type-v", metavar="TYPE", help="Type of the cached values, as for keys."),
]

Archive = Annotated[
    str | None,
    typer.Option(
        "--archive",
        metavar="SIZE",
        help="With --policy recall: the most tokens (20000) or bytes (2GiB) archived.",
        show_default="half of the free memory; of the disk's free space with --archive-file",
    ),
]

ArchiveFile = Annotated[
    str | None,
    typer.Option(
        "--archive-file",
        metavar="PATH",
        help="With --policy recall: keep the archive in a new file, not in host memory. The file loses its "
        "name at once, and its space is free again when kvtool ends.",
        show_default="host memory",
    ),
]

ArchiveType = Annotated[
    str,
    typer.Option(
        "--archive-type",
        metavar="TYPE",
        help="With --policy recall: type of the archived keys and values, as for -ctk.",
    ),
]

Flash = Annotated[
    str, typer.Option("-fa", "--flash-attn", metavar="MODE", help="Flash attention: on, off or auto.")
]

# how tokens are drawn

Temp = Annotated[
    float, typer.Option("--temp", metavar="T", help="Temperature; 0 always takes the likeliest token.")
]

TopK = Annotated[
    int, typer.Option("--top-k", metavar="K", help="Draw from the K likeliest tokens; 0 means from all.")
]

TopP = Annotated[
    float,
    typer.Option(
        "--top-p", metavar="P", help="Draw from the likeliest tokens whose probabilities add up to P."
    ),
]

MinP = Annotated[
    float,
    typer.Option("--min-p", metavar="P", help="Drop tokens less likely than P times the likeliest."),
]

RepeatPenalty = Annotated[
    float,
    typer.Option("--repeat-penalty", metavar="X", help="Make recently used tokens less likely; 1 means off."),
]

Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, metavar="N", help="Seed for drawing tokens.", show_default="random"),
]

# what is said

Explain = Annotated[
    bool,
    typer.Option("--explain", help="First say on stderr how the budget is split and what will happen."),
]

Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Show llama.cpp's log, and statistics, on stderr.")
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
