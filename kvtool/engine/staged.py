"""A text that is read in chunks, each of which attends exactly to everything before it.

Archived keys and values are copied to the device layer by layer while the chunk is computed. The text is read
as with the full cache, and the device holds two layers of it instead of all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtool.engine.stream import Stream, pad
from kvtool.errors import LibraryError
from kvtool.llama.context import Context
from kvtool.llama.devices import gpu_free_bytes

_LEAST = 64
"""Tokens of the shortest text that a GPU reads so unasked: making the buffers takes some milliseconds."""


def n_readable(stream: Stream, n: int) -> int:
    """Return how many of the next n tokens can be read so; 0 if the text is better read otherwise.

    Keys must lie at their true distances, which they do up to half of the context. Attention to archived
    tokens is traced by the host, so nothing is read so meanwhile.
    """
    archive = stream.context.archive
    if not stream.n_chunk or not archive or archive.is_traced or stream.n_restart:
        return 0
    is_asked = stream.settings.prefill == "exact"
    n = min(n, stream.n_ctx // 2 - stream.n_past)
    if n < (1 if is_asked else _LEAST) or stream.n_kv + n <= stream.policy.n_live:
        return 0
    if stream.n_refused is not None and n >= stream.n_refused:
        return 0
    return n if is_asked or device_bytes(stream, stream.n_past + n) <= gpu_free_bytes() else 0


def device_bytes(stream: Stream, n: int) -> int:
    """Return about how many bytes a device needs to attend to n archived tokens at once."""
    assert stream.context.archive
    layer_bytes = max(stream.context.archive.layer_bytes)
    # two buffers, the same once more as llama.cpp's kernels convert it, and a mask in half precision
    return n * (4 * layer_bytes + 2 * stream.n_chunk)


def read(
    stream: Stream, tokens: np.ndarray, stopped: Callable[[], bool], evict: Callable[[], None]
) -> int | None:
    """Decode a text i32[n], whose last token gives logits. Return how many tokens were read.

    Return None, and change nothing, if a device lacks memory and nobody has asked for this way of reading.

    stopped
        Asked before each chunk whether to end.
    evict
        Evicts tokens over the budget.

    Raises what `Engine.step` raises, and LibraryError where a device lacks memory.
    """
    context, policy = stream.context, stream.policy
    assert isinstance(context, Context)
    assert context.archive
    n_filled = int(stream.eviction.layer_cells.max()) - policy.n_live
    done, is_ready = 0, False
    try:
        stream.eviction.resize(
            np.full_like(stream.eviction.layer_cells, pad(policy.n_live + stream.n_chunk + n_filled))
        )
        context.archive.stage(stream.n_past + len(tokens))
        is_ready = True
        while done < len(tokens) and not stopped():
            part = tokens[done : done + min(stream.n_chunk, context.n_batch)]
            stream.decode(part, int(done + len(part) == len(tokens)))
            done += len(part)
            evict()
    except LibraryError:
        if is_ready or stream.settings.prefill == "exact":
            raise
        stream.n_refused = len(tokens)
        return None
    finally:
        context.archive.stage(0)
        stream.eviction.resize(stream.eviction.layer_cells)
    return done
