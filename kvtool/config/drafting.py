"""Find how many draft tokens a step may have, and make the drafters that --draft names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.config.model import find_model, loaded_model
from kvtool.config.run import DRAFTERS, RunOptions, WriteOptions
from kvtool.drafts.drafter import Drafter
from kvtool.engine.settings import MAX_DRAFT
from kvtool.errors import KvtoolError, UsageError
from kvtool.models.layers import Layers

if TYPE_CHECKING:
    from kvtool.drafts.model import ModelDraft
    from kvtool.drafts.mtp import MtpDraft
    from kvtool.engine.loop import Engine
    from kvtool.llama.loaded.model import Model
    from kvtool.models.header import ModelInfo
    from kvtool.policy import Policy

_LOOKUP, _MTP, _OFF = DRAFTERS

_STATE_BYTES = 256 * 2**20
"""Maximum number of bytes that copies of recurrent states may take on the device."""


def max_draft_tokens(run: RunOptions, layers: Layers, kind: type[Policy], n_batch: int) -> int:
    """Return the maximum number of draft tokens in a step.

    Raises UsageError if the user gave --draft and the model or the policy does not work with draft tokens.
    """
    if not isinstance(run, WriteOptions) or run.draft == _OFF:
        return 0
    obstacle = ""
    if not layers.can_drop:
        obstacle = "this model, which cannot drop draft tokens"
    elif kind.has_recall() and not layers.has_values:
        obstacle = "recall of tokens (MLA), which the tokens of a step share"
    if obstacle and "draft" in run.given:
        raise UsageError(f"--draft {run.draft} cannot be used with {obstacle}; leave it out")
    if obstacle:
        return 0
    # each draft token needs one more copy of all recurrent states
    most = max(_STATE_BYTES // layers.recurrent_bytes, 1) if layers.recurrent_bytes else MAX_DRAFT
    return min(MAX_DRAFT, n_batch - 1, most)


def uses_mtp(run: RunOptions, info: ModelInfo) -> bool:
    """True if the model itself makes draft tokens. Raises UsageError if its file has no layers for this."""
    if not isinstance(run, WriteOptions) or run.draft != _MTP:
        return False
    if not info.has_mtp:
        raise _no_mtp(info.path, "its file has no layers for multi-token prediction (MTP)")
    return True


def _no_mtp(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path.name} cannot draft for itself: {reason}; choose --draft lookup, or --draft MODEL with a "
        "smaller model of the same vocabulary"
    )


class Drafts:
    """Factory of drafters for the engines of a run. `opened` creates it.

    draft_model: the model that --draft names, or None. It makes draft tokens where lookup finds nothing.
    mtp: True if the engine's own model makes draft tokens where lookup finds nothing.
    """

    def __init__(self, draft_model: Model | None, *, mtp: bool = False) -> None:
        self._draft_model, self._mtp = draft_model, mtp
        self._stack = ExitStack()

    def of(self, engine: Engine) -> Drafter | None:
        """Return a drafter for an engine, or None if the engine takes no draft tokens."""
        if not engine.settings.n_draft:
            return None
        from kvtool.drafts.lookup import Lookup

        source: MtpDraft | ModelDraft
        if self._mtp:
            from kvtool.drafts.mtp import MtpDraft

            source = MtpDraft(engine)
        elif self._draft_model:
            from kvtool.drafts.model import ModelDraft

            source = ModelDraft(self._draft_model, engine.settings.n_threads, engine.model.n_vocab)
        else:
            return Drafter(Lookup())
        return Drafter(Lookup(), self._stack.enter_context(closing(source)))

    def close(self) -> None:
        """Free the caches of the draft model or of the MTP layers."""
        self._stack.close()


@contextmanager
def opened(run: RunOptions, model: Model) -> Iterator[Drafts]:
    """Load the draft model if --draft names one. Raises KvtoolError if it does not fit `model`."""
    name = run.draft if isinstance(run, WriteOptions) else _OFF
    if name in (_LOOKUP, _OFF):
        yield Drafts(None)
        return
    if name == _MTP:
        if not model.has_mtp:
            raise _no_mtp(model.path, "llama.cpp cannot compute its layers for multi-token prediction (MTP)")
        with closing(Drafts(None, mtp=True)) as drafts:
            yield drafts
        return
    from kvtool.drafts.model import check_draft

    # reset --rpc, --lora and the options that place tensors, because they are for the large model
    own = replace(run, rpc=None, lora=(), override_tensor=(), cpu_moe=False, n_cpu_moe=None)
    if run.rpc:
        # The draft model uses no workers. The values of these options also count the workers' devices, so
        # reset them
        own = replace(own, split_mode="layer", tensor_split=None, main_gpu=0)
    with ExitStack() as stack:
        try:
            draft_model = stack.enter_context(loaded_model(own, find_model(name)))
        except KvtoolError as error:
            error.args = (f"--draft {name}: {error}",)
            raise
        check_draft(model, draft_model)
        yield stack.enter_context(closing(Drafts(draft_model)))
