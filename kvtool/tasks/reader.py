"""Reads a prompt under a policy and answers: what every task asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvtool.conversation import Writer, wants_bos
from kvtool.engine import Engine, Settings
from kvtool.errors import InputError
from kvtool.kernels import token_nll
from kvtool.llama import Model, Sampler
from kvtool.policy import Policy
from kvtool.template import Template

N_OUTPUT = 64
"""The most tokens of an answer that one step scores."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of a text of n tokens: the sum of their log-probabilities in nats; greedy: each was the likeliest."""

    logp: float
    n: int
    greedy: bool


class Reader:
    """One engine, or one after the other where the budget goes by the prompt.

    policy_for: what serves a prompt and an answer of so many tokens. template: for prompts that are a user's
    turn. n_prompt: of a longer prompt the middle is left out, as LongBench does; the trained context unless
    given.
    n_read, is_cut: tokens of the last prompt as it was read, and whether some were left out.
    """

    def __init__(
        self,
        model: Model,
        policy_for: Callable[[int, int], Policy],
        settings: Settings,
        template: Template | None = None,
        n_prompt: int | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.template = template
        self.n_prompt = n_prompt or model.n_ctx_train
        self.n_read = 0
        self.is_cut = False
        self._policy_for = policy_for
        self._engine: Engine | None = None
        self._n_held = len(model.tokenize(template.reply_start(), special=True)) if template else 0

    @property
    def engine(self) -> Engine:
        """That of the last prompt."""
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        if self._engine:
            self._engine.close()
            self._engine = None

    def read(self, prompt: str, n_answer: int) -> None:
        """Reads a prompt into an empty cache; up to n_answer tokens are to follow. Raises as Engine does."""
        tokens = self._tokens(prompt, n_answer)
        policy = self._policy_for(len(tokens), n_answer)
        if self._engine is None or self._engine.policy != policy:
            self.close()
            self._engine = Engine(self.model, policy, self.settings)
        else:
            self._engine.reset()
        self.n_read = len(tokens)
        if self.template:
            self._engine.hold(self._n_held)
        self._engine.read(tokens)
        self._logits = self._last_logits()

    def write(self, n_max: int, stop: Sequence[str] = ()) -> str:
        """The likeliest text after what was read, up to the end of the model's turn or any of the stops."""
        return self._write(Sampler(self.model.n_vocab, **_GREEDY), n_max, stop)

    def sample(self, n_max: int, *, temp: float, top_p: float, seed: int) -> str:
        """A text drawn after what was read."""
        drawing = _GREEDY | {"temp": temp, "top_p": top_p, "seed": seed}
        return self._write(Sampler(self.model.n_vocab, **drawing), n_max)

    def log_likelihood(self, text: str) -> Likelihood:
        """Of the text after what was read, each token of it decoded, with the evictions that come."""
        tokens = self.model.tokenize(text)
        if not len(tokens):
            raise InputError("an answer without a token has no likelihood")
        nll, greedy, n = np.empty(len(tokens)), True, 0
        for logits in self._predictions(tokens):
            target = tokens[n : n + len(logits)]
            logits = logits[: len(target)]
            token_nll(logits, target, nll[n : n + len(target)])
            greedy = greedy and bool((logits.argmax(axis=1) == target).all())
            n += len(target)
        self._logits = self._last_logits()
        return Likelihood(-float(nll.sum()), n, greedy)

    @contextmanager
    def going_back(self) -> Iterator[Callable[[], None]]:
        """What it gives takes all back to where it was, so that several texts are scored after one prompt."""
        saved = {name: array.copy() for name, array in self.engine.save()}
        logits = self._logits

        def back() -> None:
            self.engine.restore(saved)
            self._logits = logits

        yield back

    def _predictions(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        """Logits f32[n, n_vocab], part by part: what follows the prompt, and what follows each token."""
        yield self._logits
        engine, n = self.engine, 0
        while n < len(tokens):
            n_step = min(engine.room(), engine.n_until_plan, self.settings.n_output, len(tokens) - n)
            engine.step(tokens[n : n + n_step], n_step)
            n += n_step
            yield engine.context.logits()

    def _last_logits(self) -> np.ndarray:
        return self.engine.context.logits()[-1:].copy()

    def _write(self, sampler: Sampler, n_max: int, stop: Sequence[str] = ()) -> str:
        text = ""
        for piece in Writer(self.engine, sampler).write(n_max):
            text += piece
            if ends := [at for at in map(text.find, stop) if at >= 0]:
                text = text[: min(ends)]
                break
        sampler.close()
        return text

    def _tokens(self, prompt: str, n_answer: int) -> np.ndarray:
        """i32[n]: the prompt as it is read."""
        n_most = min(self.n_prompt, self.model.n_ctx_train - n_answer)
        whole = self._whole(prompt)
        self.is_cut = len(whole) > n_most
        if self.is_cut:
            inner = self.model.tokenize(prompt)
            n_kept = len(inner) - (len(whole) - n_most)
            # what is written out and tokenized again may take more tokens than it was
            while len(whole) > n_most and n_kept > 0:
                ends = inner[: n_kept - n_kept // 2], inner[len(inner) - n_kept // 2 :]
                whole = self._whole("".join(map(self._text, ends)))
                n_kept -= max(len(whole) - n_most, 1)
        if not 0 < len(whole) <= n_most:
            raise InputError(f"there is no room for a prompt: {n_most} tokens beside the answer's {n_answer}")
        return whole

    def _whole(self, prompt: str) -> np.ndarray:
        if self.template is None:
            return self.model.tokenize(prompt, start=True)
        text = self.template.render([{"role": "user", "content": prompt}])
        return self.model.tokenize(text, special=True, start=wants_bos(self.model, text))

    def _text(self, tokens: np.ndarray) -> str:
        return b"".join(map(self.model.piece, tokens.tolist())).decode("utf-8", "ignore")


_GREEDY = {"temp": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "seed": 0}
