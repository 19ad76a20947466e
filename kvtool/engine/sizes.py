"""Choose the sizes of a cache for a policy and settings, and open a llama.cpp context of these sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.llama.cache.archive import ArchiveSettings
from kvtool.llama.cache.context import Context
from kvtool.llama.loaded.model import Model
from kvtool.models.layers import PAD
from kvtool.policy import Policy, SignalRequest

if TYPE_CHECKING:
    from kvtool.llama.cache.full_context import AnyContext

_N_DEFER = 32
"""Maximum tokens whose signals are computed together. A higher limit saves little time, but takes memory."""

_N_CHUNK = 1024
"""Tokens of an exact chunk on a GPU. Each chunk copies the archive to the GPU, so short chunks are slow."""


class Sizes(NamedTuple):
    """Sizes of a cache, in tokens.

    Attributes
    ----------
    n_ctx
        Context length: keys are rotated to positions below n_ctx.
    n_start
        Number of cells of each layer while the cache is empty.
    n_cell
        Maximum number of tokens in the cache before an eviction.
    n_batch
        Maximum number of tokens of a step while there are archived tokens. Otherwise, `settings.n_batch` is
        the maximum.
    n_chunk
        Maximum number of tokens of an exact chunk (see `ExactReader`); 0 if no text is read exactly.
    """

    n_ctx: int
    n_start: int
    n_cell: int
    n_batch: int
    n_chunk: int

    @classmethod
    def of(cls, policy: Policy, settings: Settings, model: Model) -> Sizes:
        """Choose sizes for a policy that fits the model."""
        n_ctx = min(settings.n_ctx or model.n_ctx_train, model.n_ctx_train)
        n_cell = n_start = policy.n_live
        n_batch, recall = settings.n_batch, policy.recall
        if policy.ragged:
            # llama.cpp's own table of cells needs room only for the tokens since the last edit; the layers
            # grow separately
            n_start = policy.slack + n_batch + 1
        elif policy.evicts and settings.over_budget and not recall:
            n_cell = n_start = max(policy.budget, min(policy.budget - policy.slack + n_batch, n_ctx))
        if recall:
            n_start += recall.n_filled(model.layers.has_values)
            n_batch = min(n_batch, recall.chunk)
        return cls(n_ctx, pad(n_start), n_cell, n_batch, _chunk(policy, settings, model, n_ctx))


def _chunk(policy: Policy, settings: Settings, model: Model, n_ctx: int) -> int:
    if not (policy.recall and model.layers.can_stage):
        return 0
    # After gaps are closed, a chunk needs positions after the live cells. The distances of its last query are
    # up to half of the context plus the chunk; they must not exceed the context
    most = min(n_ctx // 2, n_ctx - policy.n_live)
    if settings.prefill == "exact":
        return min(settings.n_batch, most)
    on_gpu = settings.prefill is None and model.is_on_gpu
    return min(max(settings.n_batch, _N_CHUNK), most) if on_gpu else 0


def pad(n: int) -> int:
    """Round a number of tokens up to a multiple of 256, as llama.cpp does for the cells of a cache."""
    return -(-n // PAD) * PAD


def open_context(
    model: Model, policy: Policy, request: SignalRequest, settings: Settings, sizes: Sizes
) -> AnyContext:
    """Make an empty cache that computes the signals of a policy's request.

    Raises UsageError if the cache needs more cells than the model allows (`Layers.max_cells`).
    """
    # ragged rows begin with fewer than n_live cells, and grow later
    _check_index(model, max(sizes.n_start, pad(policy.n_live)))
    how: dict[str, Any] = {
        "type_k": settings.type_k,
        "type_v": settings.type_v,
        "flash": settings.flash,
        "n_threads": settings.n_threads,
        "n_output": max(settings.n_output, settings.n_draft + 1),
    }
    if model.layers.only_full:
        # imported here, because most chats do not need this module
        from kvtool.llama.cache.full_context import FullContext

        return FullContext(model, sizes.n_start, settings.n_batch, **how)
    fills_all = policy.recall and model.layers.has_values
    context = Context(
        model,
        sizes.n_start,
        max(settings.n_batch, sizes.n_chunk),
        request,
        ragged=policy.ragged,
        # steps fill all cells after the live cells, including the cells that `pad` has added
        n_filled=sizes.n_start - policy.n_live if fills_all else 0,
        n_draft=settings.n_draft,
        repeats=bool(policy.recall and settings.resident),
        n_defer=min(policy.slack, _N_DEFER) if policy.slack > 1 else 0,
        archive=ArchiveSettings(
            settings.archive_type,
            n_near=sizes.n_ctx // 2,
            n_max=settings.archive,
            max_bytes=settings.archive_bytes,
            file=settings.archive_file,
        ),
        **how,
    )
    if policy.reconstruction:
        # turn signals off: the policy reads only those of the reconstruction pass, which turns them on
        context.watch(on=False)
    return context


def _check_index(model: Model, n_cell: int) -> None:
    if n_cell > (n_most := model.layers.max_cells):
        raise UsageError(
            f"{model.path.name} attends only to {n_most:,} cells that its index chooses, so its cache has at "
            f"most that many; {n_cell:,} are needed: choose a smaller --budget, --batch-size or --ctx-size"
        )
