"""llama.cpp's own samplers."""

from __future__ import annotations

import ctypes
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvtool.errors import UsageError
from kvtool.llama.candidates import apply, candidates
from kvtool.llama.decoder import Decoder
from kvtool.llama.grammar import Constraint, Grammar
from kvtool.llama.library import api
from kvtool.llama.model import Model
from kvtool.options.sampling import Sampling

_N_MIROSTAT = 100
"""Tokens by which Mirostat 1 estimates: llama.cpp's own number, and the paper's."""


class Sampler:
    """llama.cpp's own chain of samplers, in the order of its command line.

    Parameters
    ----------
    model
        Gives the vocabulary.
    settings
        How tokens are drawn; the likeliest is taken if not given.
    seed
        Drawn if not given.
    grammar
        Makes the grammar that the settings name.

    Attributes
    ----------
    recent
        The last tokens sampled, which the penalties look back at.

    Raises
    ------
    UsageError
        For a grammar that does not parse, and a bias of a token that is not in the vocabulary.
    """

    def __init__(
        self,
        model: Model,
        settings: Sampling | None = None,
        *,
        seed: int | None = None,
        grammar: Callable[[Model, str], Constraint] = Grammar,
    ) -> None:
        self.model = model
        self.settings = settings or Sampling()
        self.seed = secrets.randbits(31) if seed is None else seed
        self.recent: deque[int] = deque(maxlen=self.settings.n_recent)
        self._constraint = grammar
        self._chain: Any = None
        self._grammar: Constraint | None = None
        self._n = 0
        self.start(0)

    def start(self, n: int) -> None:
        """Begins the nth text: its draws depend on the seed and n alone, and a grammar begins anew."""
        self._begin(n, self.settings)

    def resume(self, recent: Sequence[int], seed: int) -> None:
        """Draws by this seed from now on, in a stream of which these tokens were sampled last."""
        self.seed = seed
        self.recent.clear()
        self.recent.extend(recent)

    def change(self, settings: Sampling) -> None:
        """Takes other settings and begins the present text again; what was sampled and the seed stay.

        Raises UsageError as the constructor does; then nothing changes.
        """
        self._begin(self._n, settings)

    def _begin(self, n: int, settings: Sampling) -> None:
        self._check_bias(settings)
        grammar = self._constraint(self.model, settings.grammar) if settings.grammar is not None else None
        self.close()
        if settings.n_recent != self.recent.maxlen:
            self.recent = deque(self.recent, maxlen=settings.n_recent)
        self.settings, self._n, self._grammar = settings, n, grammar
        self._chain = chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        # llama.cpp takes the greatest seed for a random one
        for sampler in self._samplers((self.seed + n * 0x9E3779B9) % 0xFFFFFFFF):
            api.llama_sampler_chain_add(chain, sampler)
        for token in self.recent:
            api.llama_sampler_accept(chain, token)

    def _check_bias(self, settings: Sampling) -> None:
        n = self.model.n_vocab
        for token, _ in settings.logit_bias:
            if not 0 <= token < n:
                raise UsageError(f"--logit-bias: token {token} is not in the vocabulary, which is 0..{n - 1}")

    def _samplers(self, seed: int) -> Iterator[Any]:
        """The links of the chain, which frees them."""
        its, n_vocab = self.settings, self.model.n_vocab
        if its.logit_bias:
            pairs = [api.llama_logit_bias(token, bias) for token, bias in its.logit_bias]
            bias = (api.llama_logit_bias * len(pairs))(*pairs)
            yield api.llama_sampler_init_logit_bias(n_vocab, len(pairs), bias)
        if not its.mirostat:
            yield from self._penalties()
            # of all that drop tokens only these two can drop the likeliest
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

    def sample(self, cache: Decoder) -> int:
        """The next token, from the cache's `next_logits`.

        Raises UsageError where the grammar allows nothing that the vocabulary has.
        """
        if self._grammar is None and cache.has_own_logits:
            token: int = api.llama_sampler_sample(self._chain, cache.handle, cache.next_output)
        else:
            logits = cache.next_logits
            if self._grammar:
                token = self._fitting(self._grammar, logits)
            else:
                token = self._drawn(candidates(np.arange(len(logits), dtype=np.int32), logits))
            api.llama_sampler_accept(self._chain, token)
        self.recent.append(token)
        return token

    def _fitting(self, grammar: Constraint, logits: np.ndarray) -> int:
        """A token that fits the grammar, by logits f32[n_vocab].

        As llama.cpp does it: a draw that fits stays, since most do, and to try all tokens takes long. For
        one that does not fit, another is drawn from those that do.
        """
        everything = np.arange(len(logits), dtype=np.int32)
        token = self._drawn(candidates(everything, logits))
        if grammar.take(token):
            return token
        fitting = candidates(everything, logits)
        fitting["logit"][~grammar.fitting()] = -np.inf
        token = self._drawn(fitting)
        # llama.cpp ends the process at a token that does not
        if not grammar.take(token):
            raise UsageError(
                "the grammar has come to a place that no token of this model continues; change the grammar"
            )
        return token

    def _drawn(self, found: np.ndarray) -> int:
        at = apply(self._chain, found)
        return int(found["id"][at])

    def close(self) -> None:
        """Frees the chain and the grammar."""
        if self._chain:
            api.llama_sampler_free(self._chain)
        if self._grammar:
            self._grammar.close()
        self._chain = self._grammar = None
