"""Prompts of /v1/completions: their tokens, and the part of them that an engine need not read again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtool.chats.prompt import wants_bos
from kvtool.chats.writer import Writer, n_equal
from kvtool.llama.loaded.model import Model
from kvtool.serve.api.errors import ApiError
from kvtool.serve.api.requests import TextRequest
from kvtool.serve.store.resumer import min_start, n_before_checkpoint


def tokens_of(model: Model, prompt: str | list[int]) -> np.ndarray:
    """Return the tokens i32[n] of a prompt.

    Raises ApiError if there is no token, or if a token is not in the vocabulary.
    """
    if isinstance(prompt, str):
        tokens = model.tokenize(prompt, special=True, start=wants_bos(model, prompt))
    elif prompt and (min(prompt) < 0 or max(prompt) >= model.n_vocab):
        raise ApiError(f"prompt must have tokens in 0..{model.n_vocab - 1}", param="prompt")
    else:
        tokens = np.array(prompt, np.int32)
    if not len(tokens):
        raise ApiError("prompt must have at least one token", param="prompt")
    return tokens


def n_reused(writer: Writer, request: TextRequest, tokens: np.ndarray) -> int:
    """Return how many of a prompt's tokens i32[n] need not be read, because the engine has them."""
    # a prompt that is scored must be read, and tokens that a chat has pinned must not stay pinned
    if not request.reuses or request.is_scored or writer.engine.n_pinned:
        return 0
    # read at least one token, because its logits are needed
    n = n_equal(writer.stream, tokens[:-1])
    return writer.engine.n_kept(min(n, writer.engine.n_past))


def rewind(writer: Writer, request: TextRequest, tokens: np.ndarray) -> int:
    """Rewind the engine to the first token that is different in a prompt i32[n]. Return what `n_reused` does.

    If the archive has dropped tokens that the rewind needs, empty the engine and return 0.
    """
    n = n_reused(writer, request, tokens)
    if n and writer.rewind(n, {"recent": [], "unread": [], "seed": writer.sampler.seed}):
        writer.engine.hold(0)
        return n
    writer.reset()
    return 0


def read(
    writer: Writer,
    request: TextRequest,
    tokens: np.ndarray,
    after_step: Callable[[slice], None] | None,
) -> bool:
    """Read the unread tokens i32[n] of a prompt. Return False if reading was stopped.

    Make a checkpoint near the end, because the next prompt may be equal or longer.

    after_step: see `Writer.read`. It is given if the request is scored.
    """
    engine, checkpoints = writer.engine, writer.engine.checkpoints
    n = n_before_checkpoint(engine, len(tokens) - 1)
    reuses = request.reuses and not request.is_scored and not engine.reads_whole(len(tokens))
    if reuses and checkpoints.max_bytes > 0 and n >= min_start(engine):
        if not writer.read(tokens[:n]):
            return False
        checkpoints.take()
        tokens = tokens[n:]
    return writer.read(tokens, after_step)
