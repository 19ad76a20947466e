"""How far a cell's predictions are from those of the full cache on the same tokens.

The full cache's run leaves a reference on the disk: of every scored token the likeliest tokens and their
log-probabilities. Against it others get KL(full || theirs), where all the other tokens count as one, so that
it is a lower bound of the whole divergence; `N_TOP` is such that little is missing. References lie in the
per-user cache, and the oldest go where they become too many.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvtool.errors import InputError
from kvtool.kernels.likelihood import divergence, log_probs
from kvtool.measure.perplexity import nll_of
from kvtool.system.files import locked, replacing
from kvtool.system.paths import cache_dir

N_TOP = 2048
"""Tokens of each prediction that a reference keeps."""

MOST_BYTES = 2 * 2**30
"""What all references together may take."""


def path_of(key: Mapping[str, Any]) -> Path:
    """Where the reference of that model, text and those settings is, or would be."""
    name = hashlib.sha256(json.dumps([N_TOP, key], sort_keys=True).encode()).hexdigest()[:32]
    return _folder() / f"{name}.ref"


def fits(n: int, n_vocab: int) -> bool:
    """Whether a reference of n scored tokens may be kept at all."""
    return n * _row(n_vocab).itemsize <= MOST_BYTES


class Scores(ABC):
    """What became of every token i32[n] but the first, filled step by step by `score`.

    nll: by the full cache, f64[n - 1]. kl f64[n - 1], in nats. same b1[n - 1]: whether both have the same
    likeliest token, among equals the lowest.
    """

    def __init__(self, n: int) -> None:
        self.n_done = 0
        self.nll, self.kl, self.same = np.zeros(n - 1), np.zeros(n - 1), np.zeros(n - 1, np.bool_)

    @abstractmethod
    def score(self, logits: np.ndarray, target: np.ndarray) -> np.ndarray:
        """perplexity.Score."""

    def _add(self, rows: np.ndarray, logits: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Compares logits with rows of a reference. Returns the nll f64[n] by the logits."""
        part = slice(self.n_done, self.n_done + len(target))
        nll, top = np.empty(len(target)), np.empty(len(target), np.int32)
        # copies: a single row is contiguous as it is, but not writable, and kernels take no such arrays
        tokens, log_p = (rows[name].copy() for name in ("tokens", "log_p"))
        divergence(logits, np.ascontiguousarray(target), tokens, log_p, nll, self.kl[part], top)
        self.nll[part] = rows["nll"]
        self.same[part] = rows["top"] == top
        self.n_done = part.stop
        return nll


class Reader(Scores):
    """Scores against a reference of n - 1 predictions. Raises InputError where there is none of that size.

    Not a memory map: its pages would count as this process's memory, which is measured.
    """

    def __init__(self, path: Path, n: int, n_vocab: int) -> None:
        super().__init__(n)
        self._row = _row(n_vocab)
        try:
            if path.stat().st_size != (n - 1) * self._row.itemsize:
                raise FileNotFoundError
            # the least lately used goes first
            os.utime(path)
            self._file = path.open("rb")
        except OSError:
            raise InputError("the full cache's predictions are gone; run the same command again") from None

    def score(self, logits: np.ndarray, target: np.ndarray) -> np.ndarray:
        rows = np.frombuffer(self._file.read(len(target) * self._row.itemsize), self._row)
        return self._add(rows, logits, target)

    def close(self) -> None:
        self._file.close()


class Writer(Scores):
    """Writes a reference to an open file, and scores what it was made from against it."""

    def __init__(self, file: BinaryIO, n: int, n_vocab: int) -> None:
        super().__init__(n)
        self._file, self._row = file, _row(n_vocab)

    def score(self, logits: np.ndarray, target: np.ndarray) -> np.ndarray:
        rows = np.empty(len(target), self._row)
        n_top = rows["tokens"].shape[1]
        tokens = np.argpartition(logits, logits.shape[1] - n_top, axis=1)[:, -n_top:]
        # by their numbers: the same ones are then the same sum, and lie side by side
        tokens = np.sort(tokens, axis=1).astype(np.int32)
        top, log_p = np.empty(len(target), np.int32), np.empty(tokens.shape, np.float32)
        log_probs(logits, tokens, top, log_p)
        rows["nll"], rows["top"] = nll_of(logits, target), top
        rows["tokens"], rows["log_p"] = tokens, log_p
        self._file.write(rows.tobytes())
        return self._add(rows, logits, target)


@contextmanager
def writing(path: Path, n: int, n_vocab: int) -> Iterator[Scores]:
    """A Writer whose file takes its place at the end, or a Reader where another process was faster.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        if path.exists():
            with closing(Reader(path, n, n_vocab)) as reader:
                yield reader
            return
        with replacing(path) as file:
            yield Writer(file, n, n_vocab)
    _make_room(path)


def _row(n_vocab: int) -> np.dtype:
    n_top = min(N_TOP, n_vocab)
    fields = [("nll", "<f8"), ("top", "<i4"), ("tokens", "<i4", n_top), ("log_p", "<f4", n_top)]
    return np.dtype(fields)


def _folder() -> Path:
    return cache_dir() / "logits"


def _make_room(newest: Path) -> None:
    """Removes the least lately used references until the others fit."""
    found = []
    for path in newest.parent.iterdir():
        # others may remove them as well; locks are empty
        with suppress(OSError):
            found.append((path == newest, path.stat().st_mtime_ns, path.stat().st_size, path))
    total = sum(size for _, _, size, _ in found)
    for is_newest, _, size, path in sorted(found):
        if total <= MOST_BYTES or is_newest:
            return
        if size:
            with suppress(OSError):
                path.unlink()
            total -= size
