"""Draft tokens from a smaller model, which reads the same stream in its own bounded cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import MAX_DRAFT, Settings
from kvtool.errors import UsageError
from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.loaded.model import Model

_BUDGET, _EVICT_EVERY = 256, 64
"""Budget of the draft model's cache in cells, and number of tokens between evictions."""

_GOES_ON, _MIN_PROBABILITY = 0.5, 0.25
"""Minimum joint probability of all tokens of a draft.

If the probability falls below _MIN_PROBABILITY, the newest token is dropped from the draft. If it falls below
_GOES_ON, no more tokens are drafted. _GOES_ON is higher, because a step of the draft model costs more than
one more token in the verifying step.
"""


_MAX_PADDING = 128
"""Maximum difference of the sizes of two vocabularies that differ only in padding, as in llama.cpp."""


class ModelDraft:
    """Draft model for a larger model with the same vocabulary. A `Source`.

    n_vocab: size of the larger model's vocabulary. Larger tokens are not drafted. If the draft model's own
    vocabulary is smaller, nothing is drafted while a token that it lacks is among the tokens that it must
    read.
    """

    def __init__(self, model: Model, n_threads: int | None, n_vocab: int) -> None:
        policy = policies.fit("streamingllm", min(_BUDGET, model.n_ctx_train), _EVICT_EVERY)
        # with recurrent layers, tokens of several steps cannot be dropped: restore a copy of the cache
        self._has_copy = model.layers.recurrent_bytes > 0
        n_draft, checkpoints = (0, None) if self._has_copy else (MAX_DRAFT, 0)
        settings = Settings(n_draft=n_draft, n_threads=n_threads, checkpoints=checkpoints)
        self._engine = Engine(model, policy, settings)
        # the engine must make no checkpoints itself, because `_read_draft` makes the only copy that is needed
        self._engine.checkpoints.is_paused = True
        self._stream = array("i")
        self._n_vocab, self._n_own = n_vocab, model.n_vocab
        # number of the stream's tokens that were read, and the draft tokens that were read after them
        self._at = 0
        self._ahead: list[int] = []

    def close(self) -> None:
        """Free the draft model's cache."""
        self._engine.close()

    @property
    def n(self) -> int:
        return len(self._stream)

    def cut(self, n: int) -> None:
        del self._stream[n:]
        if n < self._at:
            self._begin()

    def add(self, tokens: np.ndarray) -> None:
        self._stream.frombytes(tokens.astype(np.int32).tobytes())

    def guess(self, n: int) -> np.ndarray:
        """Return at most n draft tokens i32[n]. See `likely_tokens`."""
        if len(self._stream) - self._at > 2 * _BUDGET:
            self._begin()
        if max(self._stream[self._at :], default=0) >= self._n_own:
            return np.empty(0, np.int32)
        self._catch_up()
        n = n if self._has_copy else min(n, self._engine.draft_room() + 1)
        tokens = likely_tokens(self._engine.context, self._read_draft, n)
        return tokens[np.logical_and.accumulate(tokens < self._n_vocab)]

    def _read_draft(self, token: int) -> None:
        if self._has_copy and not self._ahead:
            self._engine.checkpoints.cut(0)
            self._engine.checkpoints.take()
        self._engine.step(np.array([token], np.int32))
        self._ahead.append(token)

    def _begin(self) -> None:
        """Empty the cache. `_catch_up` then reads the newest tokens, as many as the cache can hold."""
        self._engine.reset()
        self._at, self._ahead = max(len(self._stream) - _BUDGET, 0), []

    def _catch_up(self) -> None:
        """Read the stream's new tokens, and remove draft tokens that were rejected."""
        come, n = self._stream[self._at :], 0
        while n < min(len(come), len(self._ahead)) and come[n] == self._ahead[n]:
            n += 1
        # read at least one token, for its logits
        n = min(n, len(come) - 1)
        if self._has_copy and n < len(self._ahead):
            n = 0
            if not self._engine.rewind(self._engine.n_past - len(self._ahead)):
                # memory was too short for a copy, so the rewind has failed: read the newest tokens again
                self._begin()
        else:
            self._engine.drop_drafts(len(self._ahead) - n)
        self._at, self._ahead = self._at + n, []
        self._engine.read(np.array(self._stream[self._at :], np.int32))
        self._at = len(self._stream)


def likely_tokens(context: Decoder, read: Callable[[int], None], n: int) -> np.ndarray:
    """Return at most n draft tokens i32[n]. Each is the most likely next token.

    There are fewer tokens if their joint probability becomes too low. The logits of `context` give the first
    token. read: function that decodes a token into `context`; the new logits give the next token.
    """
    found: list[int] = []
    all_true = 1.0
    while True:
        token, p = _likeliest(context.next_logits)
        all_true *= p
        if all_true < _MIN_PROBABILITY:
            break
        found.append(token)
        if len(found) == n or all_true < _GOES_ON:
            break
        read(token)
    return np.array(found, np.int32)


def _likeliest(logits: np.ndarray) -> tuple[int, float]:
    """Return the likeliest token by logits f32[n_vocab], and its probability."""
    token = int(logits.argmax())
    return token, float(1 / np.exp(logits - logits[token]).sum())


def check_draft(model: Model, draft: Model) -> None:
    """Raise UsageError if the vocabularies differ in more than padding, or in a sample of their tokens."""
    if abs(draft.n_vocab - model.n_vocab) > _MAX_PADDING or any(
        model.piece(token, special=True) != draft.piece(token, special=True)
        for token in range(0, min(model.n_vocab, draft.n_vocab), 97)
    ):
        raise UsageError(
            f"{draft.path.name} cannot draft for {model.path.name}: it has another vocabulary; "
            "choose a smaller model of the same family, or --draft lookup"
        )
