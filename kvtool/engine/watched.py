"""What a text's queries attend to, of texts that take several steps and are looked at as a whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvtool.engine.stream import Stream
from kvtool.policy import SIGNALS


def decode_watched(
    stream: Stream, tokens: np.ndarray, n_output: int, stopped: Callable[[], bool]
) -> dict[str, np.ndarray] | None:
    """Decodes a text i32[n] behind the live cells, as `Stream.decode_all`, and returns its signals.

    f32[row, n_kv] by their fields, of all its queries and of those since the last edit. None if `stopped`.

    llama.cpp's own table of ragged rows has room for a step, and no more until an edit, which clears the
    signals: those of each step are then added to what there is.
    """
    if not stream.rows.ragged:
        return stream.signals.read() if stream.decode_all(tokens, n_output, stopped) else None
    found = stream.signals.read()
    steps = stream.batches(tokens)
    for i, step in enumerate(steps):
        stream.eviction.edit(stream.rows.live, stream.rows.next_rot)
        stream.make_way(len(step))
        if not stream.decode_all(step, n_output if i == len(steps) - 1 else 0, stopped):
            return None
        before, found = found, stream.signals.read()
        for name, signal in stream.signals.of.items():
            if (spec := SIGNALS[signal]).scope == "plan":
                add = np.maximum if spec.reduction == "max" else np.add
                old = found[name][:, : before[name].shape[1]]
                add(old, before[name], out=old)
    return found
