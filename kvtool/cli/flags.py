"""The options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass


N_BATCH = 256
"""Tokens a step of a chat unless -b is given."""

POLICY = "h2o"
"""Unless --policy is given: the best or next to it on three texts with 512 and 1,024 cells, and endless."""

Model = Annotated[
    str | None,
    typer.Option(
        "-m", "--model", help="A name (kvtool models list) or a GGUF file.", show_default="$KVTOOL_MODEL"
    ),
]

Policy = Annotated[
    str,
    typer.Option("--policy", help="Which cells stay: a name (kvtool policies) or a Python file of yours."),
]

Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="Cache size: tokens kept per KV head (512), share of the trained context (10%, rounded down), "
        "or bytes (64MiB).",
    ),
]

Options = Annotated[
    list[str] | None,
    typer.Option("-o", metavar="NAME=VALUE", help="A parameter of the policy.", show_default=False),
]

EvictEvery = Annotated[
    int | None,
    typer.Option("--evict-every", min=1, help="Tokens from one eviction to the next.", show_default="16"),
]

Positions = Annotated[
    str,
    typer.Option(
        "--positions",
        help="original; in-cache; auto: original, and when the context is full gaps are closed.",
    ),
]

Prefill = Annotated[
    str | None,
    typer.Option(
        "--prefill",
        help="How a long prompt is read: stream, evicting on the way; whole, then compressed once.",
        show_default="the policy's",
    ),
]

Context = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        min=1,
        help="Positions there are; with policy full the cells.",
        show_default="trained",
    ),
]

Batch = Annotated[int | None, typer.Option("-b", "--batch-size", min=1, help="The most tokens of a step.")]

Threads = Annotated[
    int | None, typer.Option("-t", "--threads", min=1, help="CPU threads.", show_default="one a core")
]

GpuLayers = Annotated[
    int | None, typer.Option("-ngl", "--gpu-layers", min=0, help="Layers on the GPU.", show_default="all")
]

Rpc = Annotated[
    str | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT,...",
        help="Spread layers and cache over these machines, on which kvtool worker runs.",
    ),
]

TypeK = Annotated[
    str, typer.Option("-ctk", "--cache-type-k", help="Type of the cached keys: f32, f16, q8_0, ...")
]

TypeV = Annotated[str, typer.Option("-ctv", "--cache-type-v", help="Type of the cached values.")]

Flash = Annotated[str, typer.Option("-fa", "--flash-attn", help="Flash attention: on, off or auto.")]

Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="llama.cpp's own log and statistics on stderr.")
]

Explain = Annotated[
    bool,
    typer.Option(
        "--explain", help="Before starting say on stderr what the budget is for, and what will happen."
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Temp = Annotated[float, typer.Option("--temp", help="Temperature; 0 always takes the likeliest token.")]

TopK = Annotated[int, typer.Option("--top-k", help="Only the K likeliest tokens; 0: all.")]

TopP = Annotated[float, typer.Option("--top-p", help="Only the likeliest tokens up to this probability.")]

MinP = Annotated[float, typer.Option("--min-p", help="Only tokens this likely against the likeliest.")]

RepeatPenalty = Annotated[float, typer.Option("--repeat-penalty", help="Against repetition; 1: none.")]

Seed = Annotated[
    int | None, typer.Option("--seed", min=0, help="Seed of the sampler.", show_default="random")
]
