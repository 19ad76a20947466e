"""Guesses of a smaller model, which reads along in a cache of its own that never ends."""

from __future__ import annotations

from array import array

import numpy as np

from kvtool import policies
from kvtool.drafts.drafter import MOST
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import UsageError
from kvtool.llama.model import Model

_BUDGET, _EVICT_EVERY = 256, 64
"""Its cells, and tokens from one eviction to the next, between which it can take guesses back."""

_GOES_ON, _LEAST = 0.5, 0.25
"""How likely a guess must be, with all before it, for the next one to be made, and to be made itself.

A step of the small model costs more than a token more in the step that confirms it.
"""


class ModelDraft:
    """A model that guesses what another one of the same vocabulary will write. Attributes as in `Source`."""

    def __init__(self, model: Model, n_threads: int | None = None) -> None:
        policy = policies.fit("streamingllm", min(_BUDGET, model.n_ctx_train), _EVICT_EVERY)
        self._engine = Engine(model, policy, Settings(n_ahead=MOST, n_threads=n_threads))
        self._stream = array("i")
        # tokens of the stream that are read, and guesses that are read behind them
        self._at = 0
        self._ahead: list[int] = []

    def close(self) -> None:
        """Frees its cache."""
        self._engine.close()

    @property
    def n(self) -> int:
        """Tokens of the stream that it has."""
        return len(self._stream)

    def cut(self, n: int) -> None:
        """The stream has only its first n tokens now, if it had more."""
        del self._stream[n:]
        if n < self._at:
            self._begin()

    def add(self, tokens: np.ndarray) -> None:
        """The next tokens i32[n] of the stream."""
        self._stream.frombytes(tokens.astype(np.int32).tobytes())

    def guess(self, n: int) -> np.ndarray:
        """At most n tokens i32[n], each the likeliest, as long as all are likely to come."""
        engine = self._engine
        self._catch_up()
        n = min(n, engine.most_ahead() + 1)
        found: list[int] = []
        all_true = 1.0
        while True:
            token, p = _likeliest(engine.context.next_logits)
            all_true *= p
            if all_true < _LEAST:
                break
            found.append(token)
            if len(found) == n or all_true < _GOES_ON:
                break
            engine.step(np.array([token], np.int32))
            self._ahead.append(token)
        return np.array(found, np.int32)

    def _begin(self) -> None:
        """Starts over with the newest tokens: it holds no more in any case."""
        self._engine.reset()
        self._at, self._ahead = max(len(self._stream) - _BUDGET, 0), []

    def _catch_up(self) -> None:
        """Reads what has come, and takes back its own guesses that have not."""
        come, n = self._stream[self._at :], 0
        while n < min(len(come), len(self._ahead)) and come[n] == self._ahead[n]:
            n += 1
        # one at least is read, for its logits
        n = min(n, len(come) - 1)
        self._engine.take_back(len(self._ahead) - n)
        self._at, self._ahead = self._at + n, []
        if len(come) - n > 2 * _BUDGET:
            self._begin()
        self._engine.read(np.array(self._stream[self._at :], np.int32))
        self._at = len(self._stream)


def _likeliest(logits: np.ndarray) -> tuple[int, float]:
    """The likeliest token by logits f32[n_vocab], and its probability."""
    token = int(logits.argmax())
    return token, float(1 / np.exp(logits - logits[token]).sum())


def check_vocabulary(model: Model, draft: Model) -> None:
    """Raises UsageError unless both models write the same tokens by the same numbers."""
    if draft.n_vocab != model.n_vocab or any(
        model.piece(token, special=True) != draft.piece(token, special=True)
        for token in range(0, model.n_vocab, 97)
    ):
        raise UsageError(
            f"{draft.path.name} cannot guess for {model.path.name}: it has another vocabulary; "
            "choose a smaller model of the same family, or --draft lookup"
        )
