"""Exact reading: a text is read in chunks, and each chunk attends exactly to all tokens before it.

Archived keys and values are copied to the device layer by layer while a chunk is computed. Up to the end of
the context, the result is the same as with the full cache, although the device holds only two layers of the
archive at a time. There, gaps between positions are closed. From then on, queries attend to tokens that are
more than half of the context before their chunk as if these were half of the context before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvtool.engine.policy_cache import PolicyCache
from kvtool.engine.settings import Settings
from kvtool.engine.sizes import pad
from kvtool.llama.libllama.devices import gpu_free_bytes

_MIN_TOKENS = 64
"""Minimum number of tokens to read exactly, unless the settings ask for exact reading.

For fewer tokens, exact reading saves less time than it takes to make the buffers.
"""


class ExactReader:
    """Tells how many tokens can be read exactly, and allocates device memory for exact reading.

    Attributes
    ----------
    n_chunk
        Maximum number of tokens of a chunk; 0 if no text can be read exactly.
    n_max
        Maximum number of tokens that are read exactly at once, unless the settings ask for exact reading;
        None for no limit.
    is_staged
        True while chunks attend exactly to the archive.
    """

    def __init__(self, cache: PolicyCache, settings: Settings, n_chunk: int) -> None:
        self._cache = cache
        self._is_asked = settings.prefill == "exact"
        self._closes_gaps = settings.positions != "original"
        self.n_chunk = min(n_chunk, cache.context.n_batch)
        self.n_max: int | None = None
        self.is_staged = False

    def n_readable(self, n: int) -> int:
        """Return how many of the next n tokens can be read exactly; 0 if another way of reading is better.

        A single token is never read exactly, because then each step of a reply might copy the whole archive.
        While attention to archived tokens is traced, no text is read exactly, because attention can be traced
        only on the host.
        """
        cache, rows = self._cache, self._cache.rows
        archive = cache.context.archive
        if not self.n_chunk or not archive or archive.is_traced:
            return 0
        if not self._closes_gaps:
            n = min(n, cache.n_ctx - rows.next_rot)
        if rows.n_kv + n <= cache.policy.n_live:
            return 0
        if self._is_asked:
            return n if n > 1 else 0
        n_fit = gpu_free_bytes(cache.context.model.only_gpu) // self._token_bytes
        if n_fit < archive.n_max:
            n = min(n, n_fit - rows.n_past)
        if self.n_max is not None:
            n = min(n, self.n_max)
        return n if n >= _MIN_TOKENS else 0

    def device_bytes(self, n: int) -> int:
        """Return about how many bytes a device needs for the archive of a stream of n tokens."""
        assert self._cache.context.archive
        return min(n, self._cache.context.archive.n_max) * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        assert self._cache.context.archive
        # the device holds two buffers, llama.cpp's converted copies of these buffers, and a mask in half
        # precision
        return 4 * self._cache.context.archive.stage_bytes + 2 * self.n_chunk

    @contextmanager
    def staged(self, n: int) -> Iterator[None]:
        """Let chunks attend exactly to the archive of a stream of n tokens, until the context manager exits.

        Raises LibraryError if a device lacks memory.
        """
        cache, n_live = self._cache, self._cache.policy.n_live
        archive = cache.context.archive
        assert archive
        n_filled = int(cache.layer_cells.max()) - n_live
        try:
            cache.resize(np.full_like(cache.layer_cells, pad(n_live + self.n_chunk + n_filled)))
            archive.stage(min(n, archive.n_max))
            self.is_staged = True
            yield
        finally:
            self.is_staged = False
            archive.stage(0)
            # do not shrink the cache if the eviction after a chunk has failed: the chunk is still in it
            if cache.rows.n_kv <= n_live:
                cache.resize(cache.layer_cells)
