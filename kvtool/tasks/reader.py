"""Read prompts with a policy, and write or score answers. Every task uses the engine through this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvtool.chats.prompt import wants_bos
from kvtool.chats.shields import escaped, tokens_of
from kvtool.chats.template import Message, Template
from kvtool.chats.writer import Writer
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import InputError
from kvtool.llama.cache.decoder import check_finite
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from kvtool.llama.sampling import Sampling
from kvtool.measure import perplexity
from kvtool.policy import Policy

N_OUTPUT = 64
"""Maximum number of tokens of an answer that are scored in one batch."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Likelihood of a text of n tokens. logp: sum of their log-probabilities, in nats."""

    logp: float
    n: int


def n_held(model: Model, template: Template | None) -> int:
    """Number of tokens of the chat template's reply header. An answer begins after these tokens.

    They are never evicted. The number is 0 without a template.
    """
    return len(model.tokenize(template.reply_start(), special=True)) if template else 0


def max_tokens_of(answer: str) -> int:
    """Maximum number of tokens of an answer: one for each byte, and one for the space before it."""
    return len(answer.encode()) + 1


class Reader:
    """Reads prompts, and writes or scores answers.

    Budgets may depend on the prompt. If a prompt needs another policy or budget, a new engine replaces the
    old one.

    policy_for: function that returns the policy. Its arguments are the number of tokens of the prompt and the
    maximum number of tokens of the answer.
    template: chat template, if prompts are a user's turn. None if prompts are plain text.
    n_prompt: maximum tokens of a prompt. The middle of a longer prompt is cut out, as in LongBench. The
    default is the trained context. A prompt and its answer together fit in the trained context.
    beyond: True if they need not fit when n_prompt is larger than the trained context. False if the policy
    never evicts.
    sampling, seed: of the sampler for answers. By default, the most likely token is always chosen.

    n_read: number of tokens of the last prompt that were read.
    while_reading: function that is called before each step of reading a prompt. Its arguments are the number
    of tokens read so far and the number of all tokens of the prompt.
    """

    def __init__(
        self,
        model: Model,
        policy_for: Callable[[int, int], Policy],
        settings: Settings,
        template: Template | None = None,
        n_prompt: int | None = None,
        beyond: bool = False,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.settings = settings
        self.template = template
        self.n_prompt = n_prompt or model.n_ctx_train
        self._is_beyond = beyond and self.n_prompt > model.n_ctx_train
        self.n_read = 0
        self.is_cut = False
        self._sampling, self._seed = sampling, seed
        self.while_reading: Callable[[int, int], None] = lambda done, n: None
        self._policy_for = policy_for
        self._engine: Engine | None = None
        self._turns: list[Message] = []
        self._n_held = n_held(model, template)

    @property
    def engine(self) -> Engine:
        """Engine of the last prompt."""
        assert self._engine is not None
        return self._engine

    def close(self) -> None:
        if self._engine:
            self._engine.close()
            self._engine = None

    def read(self, prompt: str, n_answer: int, *, as_it_is: bool = False, uncut: bool = False) -> None:
        """Read a prompt into an empty cache. An answer of up to n_answer tokens follows.

        as_it_is: True to read the prompt as plain text, without the template. uncut: True to never cut out
        its middle. Raises InputError if the policy keeps everything and the prompt does not fit in the cache.
        """
        template = None if as_it_is else self.template
        self.is_cut = False
        tokens = self._whole(prompt, template) if uncut else self._tokens(prompt, n_answer, template)
        self._begin(len(tokens), n_answer, template)
        self._read(tokens)

    def ask(self, prompt: str, n_answer: int, *, question: str = "", opening: str = "") -> int:
        """Read a prompt without cutting it, and then the beginning of its answer.

        Return the number of tokens that were read before the question.

        question: the end of the prompt, which is read after the rest. With `--prefill whole`, the policy thus
        evicts before it knows the question. If the question is "", everything is read at once, and the number
        of all tokens is returned.

        opening: the beginning of the answer. If the prompt is plain text, a space is put before it.
        """
        self.is_cut = False
        tokens = self._whole(prompt, self.template, opening)
        n_first = len(tokens)
        if question:
            first = self._whole(prompt.removesuffix(question), self.template)
            n = min(len(first), n_first)
            differs = first[:n] != tokens[:n]
            # a token that spans the boundary is read with the question
            n_first = int(differs.argmax()) if differs.any() else n
        self._begin(len(tokens), n_answer, self.template)
        first, rest = tokens[:n_first], tokens[n_first:]
        if len(rest):
            # hold no tokens while the first part is read, because the reply header is in the rest
            self.engine.hold(0)
        if len(first):
            self._read_part(first, 0, len(tokens))
        if len(rest):
            self.engine.hold(self._n_held if self.template else 0)
            self._read_part(rest, len(first), len(tokens))
        self.n_read = len(tokens)
        return n_first

    def start(self) -> None:
        """Empty the cache, before the first turn is read.

        A budget in percent is a share of the context, not of a prompt.
        """
        n_ctx = min(self.settings.n_ctx or self.model.n_ctx_train, self.model.n_ctx_train)
        self._empty(self._policy_for(n_ctx, 0), self.template)
        self._turns = []

    def read_turn(self, text: str) -> None:
        """Read a user's turn, up to the place where the answer begins. Earlier turns stay in the cache.

        Without a template, the turn has the format of StreamingLLM, with USER and ASSISTANT.
        """
        is_first = self.engine.n_past == 0
        if self.template is None:
            tokens = self.model.tokenize(
                ("" if is_first else "\n\n") + f"USER: {text}\n\nASSISTANT:", start=is_first
            )
        elif is_first:
            tokens = self._whole(text, self.template)
        else:
            tokens = tokens_of(self.model, self.template.turn(self._turns, text))
        self._turns = [{"role": "user", "content": text}]
        self.is_cut = False
        self._read(tokens)

    def following(self, text: str) -> str:
        """Strip a text that follows a prompt. If the prompt is plain text, put a space before the text."""
        return text.strip() if self.template else f" {text.strip()}"

    def write(self, n_max: int, stop: Sequence[str] = ()) -> str:
        """Write until the model ends its turn, n_max tokens are written, or a stop string comes.

        The stop string is left out. Stop strings in the white space at the start of the text are ignored.
        """
        sampler = Sampler(self.model, self._sampling, seed=self._seed)
        text = ""
        for piece in Writer(self.engine, sampler).write(n_max):
            text += piece
            n_white = len(text) - len(text.lstrip())
            if ends := [at for string in stop if (at := text.find(string, n_white)) >= 0]:
                text = text[: min(ends)]
                break
        sampler.close()
        return text

    def log_likelihood(self, text: str) -> Likelihood:
        """Decode a text after the prompt, and return its likelihood. Evictions happen when they are due."""
        tokens = self._after_text(text)
        if not len(tokens):
            raise InputError("an answer without tokens has no likelihood")
        first = perplexity.nll_of(self._last_logits(), tokens[:1])
        nll = np.concatenate([first, *perplexity.steps(self.engine, tokens)])
        check_finite(nll, self.engine.context)
        return Likelihood(-float(nll.sum()), len(nll))

    @contextmanager
    def going_back(self) -> Iterator[Callable[[], None]]:
        """Yield a function that restores the current state, to score several texts after one prompt."""
        saved = dict(self.engine.save())
        logits = self._last_logits().copy()

        def back() -> None:
            self.engine.restore(saved)
            # copy the logits to the place where the sampler reads them
            self._last_logits()[:] = logits

        yield back

    def _last_logits(self) -> np.ndarray:
        return self.engine.context.logits()[-1:]

    def _begin(self, n: int, n_answer: int, template: Template | None) -> None:
        """Empty the cache, before a prompt of n tokens is read.

        Raises InputError if the prompt does not fit and the policy never evicts.
        """
        policy = self._policy_for(n, n_answer)
        if not policy.evicts and n > policy.budget:
            raise InputError(f"the prompt ({n:,} tokens) does not fit in the full cache ({policy.budget:,})")
        self._empty(policy, template)

    def _empty(self, policy: Policy, template: Template | None) -> None:
        """Empty the cache and use this policy from now on."""
        if self._engine and self._engine.policy == policy:
            self._engine.reset()
        else:
            self.close()
            self._engine = Engine(self.model, policy, self.settings)
        if template:
            self.engine.hold(self._n_held)

    def _read(self, tokens: np.ndarray) -> None:
        self.n_read = len(tokens)
        self._read_part(tokens, 0, len(tokens))

    def _read_part(self, tokens: np.ndarray, n_before: int, n_all: int) -> None:
        """Read tokens i32[n], which follow the first n_before tokens of a prompt of n_all tokens."""
        before, n = self.engine.n_past, len(tokens)

        def stopped() -> bool:
            # n_past may grow by more than n, because kvzip's reconstruction pass repeats the prompt
            self.while_reading(n_before + min(self.engine.n_past - before, n), n_all)
            return False

        self.engine.read(tokens, stopped=stopped)

    def _after_text(self, text: str) -> np.ndarray:
        """Tokenize a text that follows another text. Return i32[n], without the space that tokenizers add."""
        stand_in, whole = self.model.tokenize("."), self.model.tokenize(f".{text}")
        if np.array_equal(whole[: len(stand_in)], stand_in):
            return whole[len(stand_in) :]
        return self.model.tokenize(text)

    def _tokens(self, prompt: str, n_answer: int, template: Template | None) -> np.ndarray:
        """Tokenize the prompt. If it is too long, cut out its middle. Return i32[n]."""
        n_most = self.n_prompt
        if not self._is_beyond:
            n_most = min(n_most, self.model.n_ctx_train - n_answer)
        whole = self._whole(prompt, template)
        self.is_cut = len(whole) > n_most
        if self.is_cut:
            inner = self.model.tokenize(prompt)
            n_kept = len(inner) - (len(whole) - n_most)
            # try again if needed, because the shortened text may have more tokens than expected
            while len(whole) > n_most and n_kept > 0:
                ends = inner[: n_kept - n_kept // 2], inner[len(inner) - n_kept // 2 :]
                whole = self._whole("".join(map(self._text, ends)), template)
                n_kept -= max(len(whole) - n_most, 1)
        if not 0 < len(whole) <= n_most:
            raise InputError(
                f"no room for a prompt: the answer takes {n_answer:,} tokens, which leaves {n_most:,}"
            )
        return whole

    def _whole(self, prompt: str, template: Template | None, opening: str = "") -> np.ndarray:
        """Tokenize a prompt and the beginning of its answer. Return i32[n]."""
        if template is None:
            return self.model.tokenize(f"{prompt} {opening}" if opening else prompt, start=True)
        text = template.render([{"role": "user", "content": prompt}]) + escaped(opening)
        return tokens_of(self.model, text, start=wants_bos(self.model, text))

    def _text(self, tokens: np.ndarray) -> str:
        return b"".join(map(self.model.piece, tokens.tolist())).decode("utf-8", "ignore")
