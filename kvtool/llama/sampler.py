"""llama.cpp's own samplers."""

from __future__ import annotations

import secrets
from collections import deque

from kvtool.errors import UsageError
from kvtool.llama.cache import Cache
from kvtool.llama.library import api

_N_PENALTY = 64
"""Tokens that the repeat penalty looks back at: llama.cpp's default."""


class Sampler:
    """llama.cpp's own chain of samplers, in its own order.

    Parameters
    ----------
    temp
        Temperature; 0 or less takes the likeliest token.
    top_k, top_p, min_p
        As llama.cpp has them; 0, 1 and 0 are off.
    repeat_penalty
        1 is off.
    seed
        Drawn if not given.

    Attributes
    ----------
    recent
        The last tokens sampled, which the repeat penalty looks back at.

    Raises
    ------
    UsageError
        For a penalty that is not above 0.
    """

    def __init__(
        self,
        n_vocab: int,
        *,
        temp: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        seed: int | None = None,
    ) -> None:
        if repeat_penalty <= 0:
            raise UsageError(f"--repeat-penalty must be above 0, got {repeat_penalty}; 1 is none")
        self.n_vocab = n_vocab
        self.temp, self.top_k, self.top_p, self.min_p = temp, top_k, top_p, min_p
        self.repeat_penalty = repeat_penalty
        self.seed = secrets.randbits(31) if seed is None else seed
        self.recent: deque[int] = deque(maxlen=_N_PENALTY)
        self._chain = None
        self.start(0)

    def start(self, n: int) -> None:
        """Begins the nth text: its draws depend on the seed and n alone."""
        self.close()
        add = api.llama_sampler_chain_add
        self._chain = chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        if self.repeat_penalty != 1.0:
            penalties = (_N_PENALTY, self.repeat_penalty, 0.0, 0.0)
            add(chain, api.llama_sampler_init_penalties(self.n_vocab, *penalties))
        if self.temp <= 0:
            add(chain, api.llama_sampler_init_greedy())
        else:
            if self.top_k > 0:
                add(chain, api.llama_sampler_init_top_k(self.top_k))
            if self.top_p < 1:
                add(chain, api.llama_sampler_init_top_p(self.top_p, 1))
            if self.min_p > 0:
                add(chain, api.llama_sampler_init_min_p(self.min_p, 1))
            add(chain, api.llama_sampler_init_temp(self.temp))
            # llama.cpp takes the greatest seed for a random one
            add(chain, api.llama_sampler_init_dist((self.seed + n * 0x9E3779B9) % 0xFFFFFFFF))
        for token in self.recent:
            api.llama_sampler_accept(chain, token)

    def sample(self, cache: Cache) -> int:
        """The next token, from the logits of the cache's last decode."""
        token: int = api.llama_sampler_sample(self._chain, cache.handle, -1)
        self.recent.append(token)
        return token

    def close(self) -> None:
        """Frees the chain."""
        if self._chain:
            api.llama_sampler_free(self._chain)
            self._chain = None
