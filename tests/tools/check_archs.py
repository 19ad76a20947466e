"""Check kvtool's results with every architecture that it supports.

    python tests/tools/check_archs.py DIR

DIR has small random models, one per architecture. llama.cpp's test-llama-archs writes most of them, and
tests/tiny_archs.py writes the rest; `make check-archs` runs both. The program prints a line per model. The
exit status is 1 if a model fails. The checks:

full       the policy `full` gives the logits of a plain llama.cpp context, bit by bit. If the model has an
           index and flash attention is on, the logits agree up to rounding. Flash attention is not checked
           for architectures on which it makes llama.cpp itself abort
alike      evicting the same tokens in all rows gives the logits that llama.cpp's own sequence calls give, up
           to rounding. Models with sliding or recurrent layers, or with M-RoPE, are skipped
permuted   logits do not depend on the order of the cells in each row, up to rounding
ragged     if rows evict different tokens, ragged rows give the logits of plain rows, up to rounding
graph      edits that are computed as a graph, as on a device, give the same scores as edits in host memory,
           bit by bit
exact      a text that is read in chunks, each of which attends to the archive, gives the logits of `full`, up
           to rounding. Models without exact reading are skipped
recalled   synthetic cells for all archived tokens give the logits of `full`, up to rounding. Models without
           synthetic cells are skipped
saved      a restored session continues bit by bit
drafts     steps with wrong draft tokens give the logits of steps of one token, up to rounding. Models that
           cannot drop tokens are skipped
rewound    a stream that was rewound gives the logits of a stream that has not read the removed tokens, up
           to rounding
endless    a text of three times the trained length has finite scores

A second line names the policies that refuse the model, and why.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvtool import policies
from kvtool.errors import KvtoolError, UsageError
from kvtool.llama.cache.context import Context
from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.libllama.library import api
from kvtool.llama.loaded.model import Model
from kvtool.measure import perplexity
from kvtool.models.header import read
from kvtool.models.layers import ONLY_FULL, Kind
from kvtool.models.supported import unsupported
from kvtool.policy import Signal, SignalRequest
from tests.engine.exact_engines import open_engine, random_tokens
from tests.engine.test_draft import N_DRAFT, decoded_logits

ROUNDING = 1e-4
"""Tolerance: the largest allowed difference between results, divided by the results' standard deviation."""

ORDER = 3 * ROUNDING
"""Like ROUNDING, for results of which all sums are added up in a different order."""

TWICE = 20 * ROUNDING
"""Like ROUNDING, for keys that are rotated twice, and for steps of different lengths in deep models."""

HALF = 0.03
"""Like ROUNDING, for results of which one was computed with keys and values in half precision."""

NO_FLASH = ("plm",)
"""Architectures on which llama.cpp itself aborts if flash attention is on and a batch has several tokens."""

WRONG_SHIFT = ("deepseek2-ocr",)
"""Architectures whose keys llama.cpp shifts by another kind of RoPE than the one in their graph."""

WRONG_OUTPUT = ("cogvlm",)
"""Architectures for which llama.cpp gives the logits of another token if a batch has several tokens."""

EXACT = {"type_k": "f32", "type_v": "f32", "flash": "off", "n_threads": 1}
N_BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="models whose name has this in it")
    parser.add_argument("--verbose", action="store_true", help="tracebacks")
    args = parser.parse_args()
    n_failed = n_run = 0
    for path in sorted(args.folder.glob("*.gguf")):
        if args.only not in path.stem:
            continue
        reason = _refusal(path)
        if reason:
            print(f"{path.stem:24} refused: {reason}", flush=True)
            continue
        n_run += 1
        # models of the list ONLY_FULL are refused by all other policies
        checks = (full,) if read(path).architecture in ONLY_FULL else CHECKS
        results = {check.__name__: _result(check, path, args.verbose) for check in checks}
        n_failed += any(result not in ("ok", "-") for result in results.values())
        outcomes = ", ".join(f"{name} {result}" for name, result in results.items())
        print(f"{path.stem:24} {outcomes}", flush=True)
        if refused_policies := _refused_policies(path):
            print(f"{'':24} refused: {'; '.join(refused_policies)}", flush=True)
    print(f"{n_run} run, {n_failed} of them fail")
    sys.exit(n_failed > 0)


def _refusal(path: Path) -> str | None:
    if reason := unsupported(read(path)):
        return reason
    with closing(Model(path)) as model:
        try:
            assert model.layers.n_row > 0
        except KvtoolError as error:
            return str(error)
    return None


def _refused_policies(path: Path) -> list[str]:
    names = []
    for name in policies.names():
        try:
            with open_engine(path, policies.fit(name, 96, 8 if name != "full" else None)):
                pass
        except KvtoolError as error:
            names.append(f"{name} ({error})")
    return names


def _result(check: Callable[[Path], str], path: Path, verbose: bool) -> str:
    try:
        return check(path)
    except (KvtoolError, AssertionError) as error:
        if verbose:
            traceback.print_exc()
        return f"FAILS ({type(error).__name__}: {str(error)[:150]})"


def _same(actual: np.ndarray, expected: np.ndarray, tolerance: float = 0.0) -> str:
    """Compare logits or NLLs.

    tolerance: allowed difference, divided by the results' standard deviation.
    """
    assert np.isfinite(expected).all(), "not finite"
    assert np.isfinite(actual).all(), "not finite"
    assert expected.std() > 0, "all are alike"
    apart = float(np.abs(actual - expected).max() / expected.std())
    return "ok" if apart <= tolerance else f"FAILS ({apart:.2g})"


def full(path: Path) -> str:
    for flash in ("off",) if read(path).architecture in NO_FLASH else ("off", "on"):
        with open_engine(path, policies.fit("full", 200, None), flash=flash) as engine:
            tokens = random_tokens(100, n_vocab=engine.model.n_vocab)
            # MiniMax M3 gathers the cells that its index chooses, so its attention adds up in a different
            # order
            is_gathered = flash == "on" and engine.model.layers.of(Kind.INDEX)
            tolerance = ORDER if is_gathered else 0.0
            settings = EXACT | {"flash": flash}
            with closing(Decoder(engine.model, 256, 64, n_output=64, **settings)) as plain:
                for begin in range(0, len(tokens), 50):
                    engine.step(tokens[begin : begin + 50], n_output=50)
                    plain.decode(tokens[begin : begin + 50], begin, 50)
                    if (result := _same(engine.context.logits(), plain.logits(), tolerance)) != "ok":
                        return f"flash {flash}: {result}"
    return "ok"


def alike(path: Path) -> str:
    with closing(Model(path)) as model:
        # with several positions a token (M-RoPE), llama.cpp aborts if it is asked to move tokens
        if model.layers.of(Kind.SLIDING) or model.layers.of(Kind.RECURRENT) or model.layers.rope:
            return "-"
    if read(path).architecture in WRONG_SHIFT + WRONG_OUTPUT:
        return "-"
    n, n_first, n_gone, n_more = 60, 8, 32, 20

    def evict(context: Context) -> None:
        source = [*range(n_first), *range(n_first + n_gone, n)]
        moves = [
            (row, dst, src, n_gone if src < n_first else 0)
            for row in range(context.n_row)
            for dst, src in enumerate(source)
        ]
        context.apply(np.array(moves, np.int32), n - n_gone, n_gone)

    def remove(decoder: Decoder) -> None:
        decoder.remove(n_first, n_first + n_gone)
        api.llama_memory_seq_add(decoder._memory, 0, 0, n_first, n_gone)

    expected, actual = _then(path, n, n_more, remove, Decoder), _then(path, n, n_more, evict)
    return _same(actual, expected, TWICE)


def permuted(path: Path) -> str:
    n, n_more = 60, 20
    rng = np.random.default_rng(2)

    def permute(context: Context) -> None:
        moves = [
            (row, dst, src, 0)
            for row in range(context.n_row)
            for dst, src in enumerate(rng.permutation(n).tolist())
        ]
        context.apply(np.array(moves, np.int32), n, 0)

    expected, actual = (_then(path, n, n_more, edit) for edit in (lambda context: None, permute))
    return _same(actual, expected, ORDER)


def ragged(path: Path) -> str:
    n, n_keep, n_more = 60, 40, 20

    def selected(context: Context) -> np.ndarray:
        rng = np.random.default_rng(3)
        return np.stack([rng.permutation(n)[:n_keep] for _ in range(context.n_row)])

    def evict(context: Context) -> None:
        moves = [
            (row, dst, src, 0)
            for row, cells in enumerate(selected(context))
            for dst, src in enumerate(cells.tolist())
        ]
        context.apply(np.array(moves, np.int32), n_keep, n - n_keep)

    def hide(context: Context) -> None:
        moves = [
            (row, dst, src, 0)
            for row, cells in enumerate(selected(context))
            for dst, src in enumerate([*cells.tolist(), *np.setdiff1d(np.arange(n), cells).tolist()])
        ]
        n_keep_row = np.full(context.n_row, n_keep, np.int32)
        context.apply(np.array(moves, np.int32), n_keep, n - n_keep, n_keep_row=n_keep_row)

    expected = _then(path, n, n_more, evict)
    actual = _then(path, n, n_more, hide, ragged=True)
    other = _then(path, n, n_more, lambda context: None)
    assert np.abs(other - expected).max() > 10 * np.abs(actual - expected).max(), "evictions change nothing"
    return _same(actual, expected, ROUNDING)


def _then(
    path: Path,
    n: int,
    n_more: int,
    edit: Callable[[Any], None],
    kind: type[Decoder] = Context,
    **options: Any,
) -> np.ndarray:
    """Return the logits f32[n_more, n_vocab] after n tokens and an edit."""
    if kind is Context:
        options["request"] = SignalRequest() if options else SignalRequest(reads=Signal.ATTENTION)
    settings = {"n_output": N_BATCH, **EXACT, **options}
    with closing(Model(path)) as model, closing(kind(model, 256, N_BATCH, **settings)) as context:
        tokens = random_tokens(n + n_more, n_vocab=model.n_vocab)
        for begin in range(0, n, N_BATCH):
            context.decode(tokens[begin : min(begin + N_BATCH, n)], begin, 0)
        edit(context)
        parts = []
        for begin in range(n, n + n_more, 5):
            context.decode(tokens[begin : begin + 5], begin, 5)
            parts.append(context.logits().copy())
        return np.concatenate(parts)


def graph(path: Path) -> str:
    policy = policies.fit("h2o", 48, 8)
    with open_engine(path, policy) as engine:
        tokens = random_tokens(320, n_vocab=engine.model.n_vocab)
        expected = perplexity.stream(engine, tokens)
    with open_engine(path, policy) as engine:
        engine.context.apply = partial(engine.context.apply, force_graph=True)
        actual = perplexity.stream(engine, tokens)
        assert engine.n_restart > 0, "no key was turned"
    return _same(actual, expected)


def exact(path: Path) -> str:
    for flash in ("off",) if read(path).architecture in NO_FLASH else ("off", "on"):
        logits = []
        for policy, prefill in ((policies.fit("full", 200), None), (policies.fit("recall", 96, 8), "exact")):
            settings = {"prefill": prefill, "flash": flash, "archive_type": "f32", "n_batch": N_BATCH}
            try:
                with open_engine(path, policy, **settings) as engine:
                    engine.read(random_tokens(200, n_vocab=engine.model.n_vocab))
                    logits.append(engine.context.logits()[-1].copy())
            except UsageError:
                return "-"
        # with flash attention, keys and values of the archive become f16
        if (result := _same(logits[1], logits[0], ORDER if flash == "off" else HALF)) != "ok":
            return f"flash {flash}: {result}"
    return "ok"


def recalled(path: Path) -> str:
    if read(path).architecture in WRONG_OUTPUT:
        return "-"
    # beyond half of the trained context, the search limits the distances to archived tokens
    n = min(200, read(path).n_ctx_train // 2)
    fits = ("full", n), ("recall", 64, 8, ["search=all"]), ("streamingllm", 64, 8)
    logits = []
    for policy in (policies.fit(*fit) for fit in fits):
        try:
            with open_engine(path, policy, prefill="stream", archive_type="f32", **EXACT) as engine:
                if not engine.model.layers.has_values:
                    return "-"
                engine.read(random_tokens(n, n_vocab=engine.model.n_vocab))
                logits.append(engine.context.logits()[-1].copy())
        except UsageError:
            return "-"
    expected, actual, forgotten = logits
    if np.abs(forgotten - expected).max() < 20 * np.abs(actual - expected).max():
        return "FAILS (no closer than without the archive)"
    return _same(actual, expected, ROUNDING)


def saved(path: Path) -> str:
    policy = policies.fit("h2o", 48, 8)
    with open_engine(path, policy) as engine:
        tokens = random_tokens(150, n_vocab=engine.model.n_vocab)
        perplexity.stream(engine, tokens[:100])
        state = {name: array.copy() for name, array in engine.save()}
        expected = perplexity.stream(engine, tokens[100:])
    with open_engine(path, policy) as restored:
        perplexity.stream(restored, tokens[20:60])
        restored.restore(state)
        actual = perplexity.stream(restored, tokens[100:])
    return _same(actual, expected)


def endless(path: Path) -> str:
    policy = policies.fit("tova", 96, 16)
    with open_engine(path, policy) as engine:
        tokens = random_tokens(3 * engine.model.n_ctx_train, n_vocab=engine.model.n_vocab)
        nll = perplexity.stream(engine, tokens)
        assert engine.n_restart > 0, "positions did not start over"
        return "ok" if np.isfinite(nll).all() else "FAILS (not finite)"


def drafts(path: Path) -> str:
    with closing(Model(path)) as model:
        if not model.layers.can_drop:
            return "-"
    logits = []
    for rng in (None, np.random.default_rng(1)):
        with open_engine(path, policies.fit("h2o", 48, 8), n_draft=N_DRAFT) as engine:
            tokens = random_tokens(150, n_vocab=engine.model.n_vocab)
            logits.append(np.array([*decoded_logits(engine, tokens, rng)]))
    return _same(logits[1], logits[0], TWICE)


def rewound(path: Path) -> str:
    n, n_more = 90, 20
    logits = []
    for n_later in (0, 60):
        with open_engine(path, policies.fit("full", 200, None)) as engine:
            tokens = random_tokens(n + n_later, n_vocab=engine.model.n_vocab)
            engine.read(tokens[:n])
            engine.checkpoints.take()
            engine.read(tokens[n:])
            if n_later:
                assert engine.rewind(n) == n
            logits.append(
                np.array(
                    [*decoded_logits(engine, random_tokens(n_more, seed=2, n_vocab=engine.model.n_vocab))]
                )
            )
    return _same(logits[1], logits[0], ORDER)


CHECKS = (full, alike, permuted, ragged, graph, exact, recalled, saved, drafts, rewound, endless)

if __name__ == "__main__":
    main()
