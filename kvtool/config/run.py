"""Options of a run: cache, archive, model and hardware."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from kvtool import policies
from kvtool.config import sizes
from kvtool.engine.settings import FLASH, POSITIONS, PREFILLS
from kvtool.errors import UsageError
from kvtool.llama.loaded.adapters import Adapter, adapter_texts
from kvtool.llama.loaded.placement import (
    SPLIT_MODES,
    Placement,
    experts_pattern,
    parse_overrides,
    parse_shares,
)
from kvtool.options import (
    ARCHIVE,
    CACHE,
    HARDWARE,
    OUTPUT,
    Options,
    Range,
    declared,
    option,
    redeclared,
    repeated,
    tested,
    unless,
)
from kvtool.system.texts import check_file
from kvtool.units import ARCHIVE_TYPES, CACHE_TYPES, MAX_RESIDENT, MAX_THREADS, parse_bytes

POLICY, INSTEAD = "recall", "h2o"
"""The default policy, and its replacement for runs in which recall does not work.

recall is the default because it forgets nothing. h2o is the replacement because it is the best or second best
policy on three texts with 512 and 1,024 cells, and on an endless stream.
"""


ALL_LAYERS = -2
"""Value of --gpu-layers all, as in llama.cpp."""

_cache_option = partial(option, group=CACHE, in_session=True, in_record=True)
"""Declare an option of the cache. Its value is saved in sessions and in records of results."""

# accept upper and lower case, because model files and llama.cpp's documents use both Q8_0 and q8_0
_type_option = partial(_cache_option, choices=tuple(CACHE_TYPES), read=lambda raw, flag: raw.lower())

_hardware_option = partial(option, group=HARDWARE)

DRAFTERS = ("lookup", "mtp", "off")
"""Values of --draft that are not the name of a model."""


def _check_budget(text: str) -> None:
    # with this trained context, no share is less than 1 token
    sizes.parse(text, sys.maxsize)


def _check_workers(text: str) -> None:
    # imported here, because it imports `socket`, and most runs have no workers
    from kvtool.llama.libllama import endpoints

    endpoints.parse(text)


def _find_model(name: str) -> None:
    # imported here, because most commands do not check a name without opening the model
    from kvtool.models import resolve

    resolve.check_name(name)


def _find_draft(name: str) -> None:
    if name not in DRAFTERS:
        _find_model(name)


def _check_draft(name: str) -> None:
    if not name:
        raise UsageError("--draft is empty; give lookup, mtp, off or a model")


def _template_file(raw: str | None, name: str) -> str | None:
    path = raw and os.path.abspath(os.path.expanduser(raw))
    tested(check_file)(path, name)
    return path


@dataclass(frozen=True)
class RunOptions(Options):
    """Options of a run.

    default_budget, default_recall: default budgets in cells. default_recall is for policies that recall.
    scores: True if every token is scored. Then logits are computed for all tokens, and a batch may not exceed
    the budget.
    is_plain: True if the session's archive was written by an earlier version of kvtool, without Hadamard
    matrices.
    """

    default_budget: ClassVar[int] = 1024
    default_recall: ClassVar[int] = 512
    default_n_batch: ClassVar[int] = 256
    scores: ClassVar[bool] = False

    is_plain: bool = False

    policy: str = option(
        "--policy NAME",
        POLICY,
        "Eviction policy: which tokens stay in the cache. A name (kvtool policies) or a Python file.",
        group=CACHE,
        completes="policies",
        read=tested(policies.check_name),
    )
    budget: str | None = _cache_option(
        "--budget SIZE",
        None,
        "Cache size: tokens kept per KV head (512), share of the trained context (10%, rounded down), "
        "or bytes (64M or 64MiB).",
        default_text="{default_recall:,} tokens; {default_budget:,} with a policy that forgets",
        read=tested(_check_budget),
        in_record=False,
    )
    options: tuple[str, ...] = _cache_option(
        "-o, --option NAME=VALUE",
        (),
        "Set a parameter of the policy (kvtool policies NAME lists them). Repeatable.",
        default_text=False,
        completes="parameters",
        read=repeated,
        in_record=False,
    )
    evict_every: int | None = _cache_option(
        "--evict-every N",
        None,
        "Evict after every N tokens.",
        default_text="16, fewer for budgets below 128",
        valid=Range(1),
    )
    positions: str = _cache_option(
        "--positions MODE",
        "auto",
        "Positions of the kept tokens: original, in-cache (renumbered without gaps), or auto (as original, "
        "until the context is full; then gaps are closed).",
        choices=POSITIONS,
    )
    prefill: str | None = _cache_option(
        "--prefill MODE",
        None,
        "How to read a prompt longer than the budget: stream (evict after each batch), whole (decode all "
        "of it, then evict once), or exact (recall alone: each batch attends to all evicted tokens).",
        default_text="the policy's own",
        choices=PREFILLS,
    )
    model: str | None = _hardware_option(
        "-m, --model MODEL",
        None,
        "Model: a name (kvtool models list), a GGUF file, its URL, or hf:OWNER/REPO[:QUANT].",
        default_text="{model}",
        completes="models",
        find=_find_model,
    )
    lora: tuple[str, ...] = _hardware_option(
        "--lora FILE[:SCALE]",
        (),
        "Add a LoRA adapter (GGUF), times SCALE, to the model's weights. Repeatable.",
        default_text=False,
        read=adapter_texts,
        find=lambda text: Adapter.parse(text).check_exists(),
        in_session=True,
    )
    chat_template: str | None = _hardware_option(
        "--chat-template, --chat-template-file FILE",
        None,
        "Use the chat template (Jinja) in this file.",
        default_text="the model's own",
        read=_template_file,
        in_session=True,
    )
    n_ctx: int | None = _cache_option(
        "-c, --ctx-size N",
        None,
        "Context length, at most the trained length; 0 means the trained length. With `full`, also the cache "
        "size.",
        group=HARDWARE,
        default_text="the model's trained length",
        valid=Range(0),
        read=unless(0),
        aliases=("--n-ctx", "--num-ctx"),
    )
    n_batch: int | None = _cache_option(
        "-b, --batch-size N",
        None,
        "Maximum tokens decoded per batch.",
        group=HARDWARE,
        default_text="{default_n_batch}",
        valid=Range(1),
        aliases=("--n-batch",),
    )
    threads: int | None = _hardware_option(
        "-t, --threads N",
        None,
        "CPU threads.",
        default_text="the fastest number, at most one per core",
        valid=Range(1, MAX_THREADS),
    )
    gpu_layers: int | None = _hardware_option(
        "-ngl, --gpu-layers N|auto|all",
        None,
        "Number of layers on the GPU, counted from the last; auto: as many as fit.",
        default_text="auto",
        words={"auto": -1, "all": ALL_LAYERS},
        valid=Range(ALL_LAYERS),
        read=unless(-1),
        in_record=True,
        aliases=("--n-gpu-layers",),
    )
    n_cpu_moe: int | None = _hardware_option(
        "-ncmoe, --n-cpu-moe N",
        None,
        "Mixture of experts: keep the experts' weights of the first N layers in host memory.",
        default_text="0",
        valid=Range(0),
        read=unless(0),
    )
    cpu_moe: bool = _hardware_option(
        "-cmoe, --cpu-moe", False, "Mixture of experts: keep all experts' weights in host memory."
    )
    override_tensor: tuple[str, ...] = _hardware_option(
        "-ot, --override-tensor PATTERN=BUFFER,...",
        (),
        "Put tensors whose names match a regular expression into a device's buffer: CPU, CUDA0, Vulkan0. "
        "The first match counts, also before --cpu-moe. Repeatable.",
        default_text=False,
        read=repeated,
    )
    split_mode: str = _hardware_option(
        "-sm, --split-mode MODE",
        "layer",
        "With several GPUs: layer (each has some of the layers), none (one has all, see --main-gpu), or row "
        "(each has some rows of every tensor, which few GPUs can).",
        choices=SPLIT_MODES,
    )
    tensor_split: str | None = _hardware_option(
        "-ts, --tensor-split A,B,...",
        None,
        "Shares of the layers that the GPUs get, such as 3,1.",
        default_text="by free memory",
    )
    main_gpu: int = _hardware_option(
        "-mg, --main-gpu N", 0, "The GPU of --split-mode none, counted from 0.", valid=Range(0)
    )
    rpc: str | None = _hardware_option(
        "--rpc HOST:PORT,...",
        None,
        "Spread layers and cache over other machines, on which kvtool worker runs.",
        read=tested(_check_workers),
    )
    type_k: str = _type_option(
        "-ctk, --cache-type-k TYPE",
        "f16",
        "Type of the cached keys: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0.",
        aliases=("--type-k",),
    )
    type_v: str = _type_option(
        "-ctv, --cache-type-v TYPE",
        "f16",
        "Type of the cached values: any type that keys can have.",
        aliases=("--type-v",),
    )
    archive: str | None = option(
        "--archive SIZE",
        None,
        "With `recall`: limit of the archive, in tokens (20000) or bytes (2GiB). The archive grows in "
        "steps of 256 tokens, so even a few tokens may take two steps.",
        group=ARCHIVE,
        default_text="a quarter of the free memory; half of the disk's free space with --archive-file",
        read=tested(sizes.parse_archive),
    )
    archive_file: Path | None = option(
        "--archive-file PATH",
        None,
        "With `recall`: keep the archive in a new file on this machine instead of in host memory. "
        "The file does not appear in the folder, and its space is freed when kvtool ends.",
        group=ARCHIVE,
        default_text="host memory",
        read=tested(sizes.check_archive_file),
    )
    archive_type: str = _type_option(
        "--archive-type TYPE",
        "auto",
        "With `recall`: type of the archived keys and values: any type that cached keys can have, "
        "iq4_nl, or q8_0/q4_0 or q5_0/q4_0 for keys/values. auto: q8_0 with a GPU or --prefill exact; else "
        "iq4_nl; always f16 if the size of a head is not a multiple of 32.",
        group=ARCHIVE,
        choices=("auto", *ARCHIVE_TYPES),
    )
    resident: int = option(
        "--resident N",
        0,
        "With `recall`: archived tokens of each row that stay on the device, so that writing needs no "
        f"search on the host. 0: none (0 to {MAX_RESIDENT}).",
        group=ARCHIVE,
        valid=Range(0, MAX_RESIDENT),
        in_record=True,
    )
    flash: str = _cache_option(
        "-fa, --flash-attn MODE",
        "auto",
        "Flash attention: on, off or auto.",
        group=HARDWARE,
        choices=FLASH,
    )
    explain: bool = option(
        "--explain",
        False,
        "Explain the budget, and what will happen, on stderr before the run.",
        group=OUTPUT,
    )
    verbose: int = option(
        "-v, --verbose",
        0,
        "Show statistics on stderr, and where your own policy failed; -vv also shows llama.cpp's log.",
        group=OUTPUT,
        default_text=False,
        is_count=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers and self.gpu_layers == 0:
            raise UsageError("--gpu-layers 0 leaves no layer for the workers of --rpc; leave out one of them")
        # compute these properties now, because they raise UsageError for wrong options
        _ = self.placement, self.adapters

    @property
    def placement(self) -> Placement:
        """The devices on which the model's weights are. Raises UsageError if an option cannot be parsed."""
        overrides = [pair for text in self.override_tensor for pair in parse_overrides(text)]
        if self.cpu_moe or self.n_cpu_moe:
            overrides.append((experts_pattern(None if self.cpu_moe else self.n_cpu_moe), "CPU"))
        shares = () if self.tensor_split is None else parse_shares(self.tensor_split)
        return Placement(tuple(overrides), shares, self.main_gpu, self.split_mode)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters of --lora. Raises UsageError if --lora cannot be parsed."""
        return tuple(map(Adapter.parse, self.lora))

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers of --rpc, each as "HOST:PORT". Raises UsageError if --rpc cannot be parsed."""
        if self.rpc is None:
            return ()
        # imported here, because it imports `socket`, and most runs have no workers
        from kvtool.llama.libllama import endpoints

        return tuple(endpoints.parse(self.rpc))

    @property
    def instead(self) -> str | None:
        """The policy that replaces recall if recall does not work.

        None if the user chose the policy, its parameters, its archive or --prefill exact, which only recall
        has. In this case, it is an error if recall does not work.
        """
        is_chosen = self.typed_archive or self.given & {"policy", "options"} or self.prefill == "exact"
        return None if is_chosen else INSTEAD

    @property
    def typed_archive(self) -> list[str]:
        """The flags of those archive options that the user typed."""
        options = declared(RunOptions).items()
        return [option.flags[0] for name, option in options if option.group == ARCHIVE and name in self.typed]


@dataclass(frozen=True)
class WriteOptions(RunOptions):
    """Options of a run in which the model writes text."""

    draft: str = _hardware_option(
        "--draft lookup|mtp|MODEL|off",
        "lookup",
        "Speculative decoding: the model confirms several draft tokens in one step. lookup takes them from "
        "the text so far. Where lookup finds nothing, mtp takes them from the model's own layers for "
        "multi-token prediction, and MODEL from a smaller model of the same vocabulary.",
        completes="models",
        read=tested(_check_draft),
        find=_find_draft,
        aliases=("-md", "--model-draft"),
    )


@dataclass(frozen=True)
class ChatOptions(WriteOptions):
    """Options of a run with chats. A chat can go back to earlier turns."""

    checkpoints: str | None = _hardware_option(
        "--checkpoints SIZE",
        None,
        "With sliding or recurrent layers, or a policy that forgets: limit of the host memory for earlier "
        "states, so that an undo or an edited message need not read the whole chat again. 0: none.",
        default_text="the larger of 8 states and, for small states, 1/16 of the free memory",
        read=tested(parse_bytes),
    )


@dataclass(frozen=True)
class ScoreOptions(RunOptions):
    """Options of a run that streams a text and scores each token."""

    default_budget: ClassVar[int] = 512
    default_n_batch: ClassVar[int] = 64
    scores: ClassVar[bool] = True

    budget: str | None = redeclared(RunOptions, "budget", default_text="{default_budget:,} tokens")
