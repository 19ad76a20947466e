"""Reads a prompt under a policy and answers: what every task asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvtool.chats.conversation import Writer, wants_bos
from kvtool.chats.template import Message, Template
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import InputError
from kvtool.kernels.likelihood import token_nll
from kvtool.llama.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.policy import Policy

N_OUTPUT = 64
"""The most tokens of an answer that one step scores."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of a text of n tokens: the sum of their log-probabilities in nats; greedy: each was the likeliest."""

    logp: float
    n: int
    greedy: bool


def n_held(model: Model, template: Template | None) -> int:
    """How many tokens before an answer stay at every eviction: the words of the template that it follows."""
    return len(model.tokenize(template.reply_start(), special=True)) if template else 0


class Reader:
    """One engine, or one after the other where the budget goes by the prompt.

    policy_for: what serves a prompt and an answer of so many tokens. template: for prompts that are a user's
    turn. n_prompt: of a longer prompt the middle is left out, as LongBench does; the trained context unless
    given, and at most that where nothing is evicted. full_for: the same as policy_for of a policy that keeps
    everything, unless policy_for is that one. n_read, is_cut: tokens of the last prompt as it was read, and
    whether some were left out.
    """

    def __init__(
        self,
        model: Model,
        policy_for: Callable[[int, int], Policy],
        settings: Settings,
        template: Template | None = None,
        n_prompt: int | None = None,
        full_for: Callable[[int, int], Policy] | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.template = template
        self.n_prompt = n_prompt or model.n_ctx_train
        self._is_beyond = n_prompt is not None and full_for is not None
        self.n_read = 0
        self.is_cut = False
        self.full = Reader(model, full_for, settings, template, n_prompt) if full_for else self
        self._policy_for = policy_for
        self._engine: Engine | None = None
        self._turns: list[Message] = []
        self._n_held = n_held(model, template)

    @property
    def engine(self) -> Engine:
        """That of the last prompt."""
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        if self.full is not self:
            self.full.close()
        if self._engine:
            self._engine.close()
            self._engine = None

    def read(self, prompt: str, n_answer: int, *, as_it_is: bool = False, uncut: bool = False) -> None:
        """Reads a prompt into an empty cache; up to n_answer tokens are to follow. Raises as Engine does.

        as_it_is: it is no user's turn, whatever others are. uncut: its middle is never left out. Raises
        InputError for more than a cache that keeps everything has room for.
        """
        template = None if as_it_is else self.template
        self.is_cut = False
        tokens = self._whole(prompt, template) if uncut else self._tokens(prompt, n_answer, template)
        policy = self._policy_for(len(tokens), n_answer)
        if policy.slack == 0 and len(tokens) > policy.budget:
            raise InputError(f"the prompt has {len(tokens)} tokens and the full cache {policy.budget} cells")
        self._empty(policy, template)
        self._read(tokens)

    def start(self) -> None:
        """An empty cache for turns; a share of the prompt is here one of the context."""
        n_ctx = min(self.settings.n_ctx or self.model.n_ctx_train, self.model.n_ctx_train)
        self._empty(self._policy_for(n_ctx, 0), self.template)
        self._turns = []

    def read_turn(self, text: str) -> None:
        """Reads what a user says after all there is since `start`; an answer is to follow.

        Without a template as StreamingLLM has it, with USER and ASSISTANT. Raises as Engine does.
        """
        is_first = self.engine.n_past == 0
        if self.template is None:
            tokens = self.model.tokenize(
                ("" if is_first else "\n\n") + f"USER: {text}\n\nASSISTANT:", start=is_first
            )
        elif is_first:
            tokens = self._whole(text, self.template)
        else:
            tokens = self.model.tokenize(self.template.turn(self._turns, text), special=True)
        self._turns = [{"role": "user", "content": text}]
        self.is_cut = False
        self._read(tokens)

    def following(self, text: str) -> str:
        """A text as it is written after a prompt: a space parts it from a plain one."""
        return text.strip() if self.template else f" {text.strip()}"

    def write(self, n_max: int, stop: Sequence[str] = ()) -> str:
        """The likeliest text after what was read, up to the end of the model's turn or any of the stops.

        A stop counts behind the white space that a text starts with.
        """
        return self._write(Sampler(self.model.n_vocab), n_max, stop)

    def sample(self, n_max: int, *, temp: float, top_p: float, seed: int) -> str:
        """A text drawn after what was read."""
        return self._write(Sampler(self.model.n_vocab, temp=temp, top_p=top_p, seed=seed), n_max)

    def log_likelihood(self, text: str) -> Likelihood:
        """Of the text after what was read, each token of it decoded, with the evictions that come."""
        tokens = self._after_text(text)
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
            # where a sampler looks
            self.engine.context.logits()[-1:] = logits

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
            n_white = len(text) - len(text.lstrip())
            if ends := [at for each in stop if (at := text.find(each, n_white)) >= 0]:
                text = text[: min(ends)]
                break
        sampler.close()
        self._logits = self._last_logits()
        return text

    def _empty(self, policy: Policy, template: Template | None) -> None:
        """Forgets everything; what comes next is under this policy."""
        if self._engine is None or self._engine.policy != policy:
            if self._engine:
                self._engine.close()
                self._engine = None
            self._engine = Engine(self.model, policy, self.settings)
        else:
            self._engine.reset()
        if template:
            self._engine.hold(self._n_held)

    def _read(self, tokens: np.ndarray) -> None:
        self.n_read = len(tokens)
        self.engine.read(tokens)
        self._logits = self._last_logits()

    def _after_text(self, text: str) -> np.ndarray:
        """i32[n]: a text that another one is before. One space stays one, whatever the vocabulary adds."""
        stand_in, whole = self.model.tokenize("."), self.model.tokenize(f".{text}")
        if text.startswith(" ") and np.array_equal(whole[: len(stand_in)], stand_in):
            return whole[len(stand_in) :]
        return self.model.tokenize(text)

    def _tokens(self, prompt: str, n_answer: int, template: Template | None) -> np.ndarray:
        """i32[n]: the prompt as it is read."""
        n_most = self.n_prompt
        if not self._is_beyond:
            n_most = min(n_most, self.model.n_ctx_train - n_answer)
        whole = self._whole(prompt, template)
        self.is_cut = len(whole) > n_most
        if self.is_cut:
            inner = self.model.tokenize(prompt)
            n_kept = len(inner) - (len(whole) - n_most)
            # what is written out and tokenized again may take more tokens than it was
            while len(whole) > n_most and n_kept > 0:
                ends = inner[: n_kept - n_kept // 2], inner[len(inner) - n_kept // 2 :]
                whole = self._whole("".join(map(self._text, ends)), template)
                n_kept -= max(len(whole) - n_most, 1)
        if not 0 < len(whole) <= n_most:
            raise InputError(f"there is no room for a prompt: {n_most} tokens beside the answer's {n_answer}")
        return whole

    def _whole(self, prompt: str, template: Template | None) -> np.ndarray:
        if template is None:
            return self.model.tokenize(prompt, start=True)
        text = template.render([{"role": "user", "content": prompt}])
        return self.model.tokenize(text, special=True, start=wants_bos(self.model, text))

    def _text(self, tokens: np.ndarray) -> str:
        return b"".join(map(self.model.piece, tokens.tolist())).decode("utf-8", "ignore")
