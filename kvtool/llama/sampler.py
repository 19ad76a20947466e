"""Sampling by llama.cpp's samplers, under a constraint if there is one."""

from __future__ import annotations

import ctypes
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

import numpy as np

from kvtool.errors import UsageError
from kvtool.llama.cache.decoder import Decoder, check_finite
from kvtool.llama.grammar import gbnf, schema
from kvtool.llama.grammar.constraint import Constraint, Matcher, Vocabulary
from kvtool.llama.grammar.rules import Rules
from kvtool.llama.grammar.triggered import Triggered
from kvtool.llama.libllama.library import api
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampling import Sampling

Around = Callable[[Matcher | Triggered | None], Constraint | None]
"""Function that makes a text's constraint from the constraint of the grammar, schema or rules.

Without these, the function gets None.
"""


def _unchanged(constraint: Matcher | Triggered | None) -> Constraint | None:
    return constraint


_NOWHERE = "the grammar has come to a place that no token of this model continues; change the grammar"

_MANY = 0.75
"""If the grammar allows more than this share of all tokens, the other tokens get the logit -inf.

Below this share, it is faster to sample from a list of the allowed tokens.
"""

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
"""A llama_token_data: a token that may be sampled."""

_N_MIROSTAT = 100
"""Number of top tokens from which Mirostat 1 estimates how fast probabilities fall, as in its paper."""


class Sampler:
    """llama.cpp's chain of samplers, in the order of llama.cpp's command line.

    By default, the most likely token is sampled, and the seed is random. `rules` replaces the grammar or
    schema of the settings. Raises UsageError for a grammar or schema that cannot be used, and a bias of a
    token outside the vocabulary.

    Attributes
    ----------
    recent
        Last sampled tokens, for the penalties.
    constraint
        Constraint on the next token. None if every token may follow.
    """

    def __init__(
        self,
        model: Model,
        settings: Sampling | None = None,
        *,
        seed: int | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.model = model
        self.settings = settings or Sampling()
        self.set_seed(seed)
        self.recent: deque[int] = deque(maxlen=self.settings.n_recent)
        self._rules = rules
        self._chain: Any = None
        # the matcher and the (grammar, schema) that it was made from
        self._matcher: Matcher | Triggered | None = None
        self._shape: tuple[str | None, str | None] | None = None
        self._around: Around = _unchanged
        self._begin(0, self.settings)

    def start(self, n: int, around: Around = _unchanged) -> None:
        """Begin text n. Restart the grammar. The text's random numbers depend only on the seed and n."""
        self._around = around
        self._begin(n, self.settings)

    def set_seed(self, seed: int | None) -> None:
        """Set the seed; None for a random seed. The next `start` or `change` uses it."""
        self.seed = secrets.randbits(31) if seed is None else seed

    def resume(self, recent: Sequence[int], seed: int) -> None:
        """Set the last sampled tokens and the seed. The next `start` or `change` uses them."""
        self.seed = seed
        self.recent.clear()
        self.recent.extend(recent)

    def remember(self, texts: Sequence[str]) -> None:
        """Count the last tokens of earlier texts as sampled. The next `start` or `change` uses them."""
        tokens: list[int] = []
        for text in reversed(texts):
            if len(tokens) >= self.settings.n_recent:
                break
            tokens[:0] = self.model.tokenize(text).tolist()
        self.resume(tokens, self.seed)

    def change(self, settings: Sampling) -> None:
        """Use other settings and begin the current text again. Keep `recent` and the seed.

        Raises UsageError as the constructor does, and then keeps the old settings.
        """
        self._begin(self._n, settings)

    def _begin(self, n: int, settings: Sampling) -> None:
        self._check_bias(settings)
        shape = settings.grammar, settings.json_schema
        if shape != self._shape:
            self._matcher = self._matcher_of(settings)
        elif self._matcher:
            self._matcher.restart()
        self.close()
        if settings.n_recent != self.recent.maxlen:
            self.recent = deque(self.recent, maxlen=settings.n_recent)
        self.settings, self._n, self._shape = settings, n, shape
        self.constraint = self._around(self._matcher)
        self._chain = chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        # keep the seed below 2**32 - 1, which llama.cpp takes as "choose a random seed"
        for sampler in self._samplers((self.seed + n * 0x9E3779B9) % 0xFFFFFFFF):
            api.llama_sampler_chain_add(chain, sampler)
        for token in self.recent:
            api.llama_sampler_accept(chain, token)

    def _matcher_of(self, settings: Sampling) -> Matcher | Triggered | None:
        rules = self._rules
        if rules is None and settings.json_schema is not None:
            rules = schema.enforced_text(settings.json_schema).rules
        elif rules is None and settings.grammar is not None:
            rules = gbnf.rules_of(settings.grammar)
        if not rules:
            return None
        return (Triggered if rules.triggers else Matcher)(Vocabulary.of(self.model), rules)

    def _check_bias(self, settings: Sampling) -> None:
        n = self.model.n_vocab
        for token, _ in settings.logit_bias:
            if not 0 <= token < n:
                raise UsageError(f"--logit-bias: token {token} is not in the vocabulary, which is 0..{n - 1}")

    def _samplers(self, seed: int) -> Iterator[Any]:
        """Yield the samplers of the chain. The chain owns and frees them."""
        its, n_vocab = self.settings, self.model.n_vocab
        # one bias a token: from a list of candidates, llama.cpp's sampler uses only a token's first bias
        biases: dict[int, float] = defaultdict(float)
        for token, bias in [*its.logit_bias, *((token, -inf) for token in self.model.suppressed)]:
            biases[token] += bias
        if biases:
            pairs = [api.llama_logit_bias(*pair) for pair in biases.items()]
            array = (api.llama_logit_bias * len(pairs))(*pairs)
            yield api.llama_sampler_init_logit_bias(n_vocab, len(pairs), array)
        if not its.mirostat:
            yield from self._penalties()
            # at temperature 0 only typical and XTC matter, because they can drop the most likely token
            if its.temp > 0 or its.typical < 1 or its.xtc_probability > 0:
                yield from self._truncations(seed)
        if its.temp <= 0:
            yield api.llama_sampler_init_greedy()
            return
        yield api.llama_sampler_init_temp(its.temp)
        target = (its.mirostat_ent, its.mirostat_lr)
        if its.mirostat == 1:
            yield api.llama_sampler_init_mirostat(n_vocab, seed, *target, _N_MIROSTAT)
        elif its.mirostat == 2:
            yield api.llama_sampler_init_mirostat_v2(seed, *target)
        else:
            yield api.llama_sampler_init_dist(seed)

    def _penalties(self) -> Iterator[Any]:
        its = self.settings
        penalties = (its.repeat_penalty, its.frequency_penalty, its.presence_penalty)
        if penalties != (1, 0, 0) and its.repeat_last_n:
            yield api.llama_sampler_init_penalties(self.model.n_vocab, its.repeat_last_n, *penalties)
        if its.dry_multiplier and its.dry_penalty_last_n:
            breakers = [text.encode() for text in its.dry_sequence_breaker]
            yield api.llama_sampler_init_dry(
                *(self.model.vocab, its.dry_multiplier, its.dry_base),
                *(its.dry_allowed_length, its.dry_penalty_last_n),
                *((ctypes.c_char_p * len(breakers))(*breakers), len(breakers)),
            )

    def _truncations(self, seed: int) -> Iterator[Any]:
        its = self.settings
        if its.top_k > 0:
            yield api.llama_sampler_init_top_k(its.top_k)
        if its.typical < 1:
            yield api.llama_sampler_init_typical(its.typical, 1)
        if its.top_p < 1:
            yield api.llama_sampler_init_top_p(its.top_p, 1)
        if its.min_p > 0:
            yield api.llama_sampler_init_min_p(its.min_p, 1)
        if its.xtc_probability > 0:
            yield api.llama_sampler_init_xtc(its.xtc_probability, its.xtc_threshold, 1, seed)

    def allows_text(self) -> bool:
        """Return False if the grammar allows no text. Restarts the grammar, so call this between texts."""
        if self._matcher:
            self._matcher.restart()
        mask = self._matcher.mask() if self._matcher else None
        return mask is None or bool((mask & Vocabulary.of(self.model).all_but_ends).any())

    def sample(self, cache: Decoder) -> int:
        """Sample the next token from the cache's `next_logits`.

        Raises UsageError if no token of the vocabulary fits the constraint. If a logit is NaN, raises the
        errors of `check_finite`.
        """
        # a NaN anywhere makes the maximum NaN; a logit of -inf is allowed
        check_finite(cache.next_logits.max(), cache)
        mask = self.constraint.mask() if self.constraint else None
        n_vocab, fits = self.model.n_vocab, None
        if mask is not None:
            fits = np.unpackbits(mask.view(np.uint8), count=n_vocab, bitorder="little").view(np.bool_)
        if cache.has_own_logits and (fits is None or self._is_quick(fits)):
            token = self._sample_all(cache, fits)
        else:
            token = self._sample_of(cache.next_logits, fits)
            api.llama_sampler_accept(self._chain, token)
        if self.constraint and not self.constraint.accept(token):
            raise UsageError(_NOWHERE)
        self.recent.append(token)
        return token

    def _is_quick(self, fits: np.ndarray) -> bool:
        """Return True if excluding tokens is faster than listing the tokens that fit. fits: b1[n_vocab].

        If a sampler sums log-probabilities, return False: the -inf of an excluded token would make the sum
        useless.
        """
        sums_logs = self.settings.typical < 1 or self.settings.mirostat
        return not sums_logs and bool(np.count_nonzero(fits) > _MANY * len(fits))

    def _sample_all(self, cache: Decoder, fits: np.ndarray | None) -> int:
        """Sample from llama.cpp's logits. During sampling the logits of tokens that do not fit are -inf."""
        logits = cache.next_logits
        excluded = np.empty(0, np.int64) if fits is None else np.flatnonzero(~fits)
        before = logits[excluded]
        logits[excluded] = -np.inf
        try:
            token: int = api.llama_sampler_sample(self._chain, cache.handle, cache.next_output)
        finally:
            logits[excluded] = before
        return token

    def _sample_of(self, logits: np.ndarray, fits: np.ndarray | None) -> int:
        """Sample from a list of the tokens that fit, with their logits. fits: None if all tokens fit."""
        tokens = np.arange(len(logits)) if fits is None else np.flatnonzero(fits)
        candidates = np.zeros(len(tokens), _CANDIDATE)
        candidates["id"], candidates["logit"] = tokens, logits if fits is None else logits[tokens]
        data = candidates.ctypes.data_as(api.llama_token_data_p)
        array = api.llama_token_data_array(data, len(tokens), -1, False)
        if len(tokens):
            # the samplers change and sort the candidates in place
            api.llama_sampler_apply(self._chain, ctypes.byref(array))
        if array.selected < 0 or candidates["logit"][array.selected] == -np.inf:
            raise UsageError(_NOWHERE)
        return int(candidates["id"][array.selected])

    def close(self) -> None:
        if self._chain:
            api.llama_sampler_free(self._chain)
        self._chain = None
