"""Divergence of a run's predictions from the full cache's predictions on the same tokens.

The run with the full cache writes a reference to the disk. For every scored token, the reference stores the
N_TOP most likely tokens and their log-probabilities. Other runs read it to compute KL(full || run). They
treat all tokens outside the N_TOP as one token. The result is therefore a lower bound, which is close to the
exact divergence.

References are stored in the per-user cache. When they become too large, the least recently used are deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any, BinaryIO

import numpy as np

from kvtool.errors import InputError
from kvtool.kernels.likelihood import divergence, log_probs
from kvtool.measure.perplexity import nll_of
from kvtool.system.files import can_write, free_disk_bytes, locked, replacing
from kvtool.system.paths import cache_dir

N_TOP = 2048

MAX_BYTES = 2 * 2**30
"""Maximum bytes of all references together."""


def path_of(key: Mapping[str, Any]) -> Path:
    """Path of the reference with this key (model, text, settings). The file may not exist yet."""
    name = hashlib.sha256(json.dumps([N_TOP, key], sort_keys=True).encode()).hexdigest()[:32]
    return _folder() / f"{name}.ref"


def fits(n: int, n_vocab: int) -> bool:
    """True if a reference of n scored tokens fits into MAX_BYTES."""
    return n * _row(n_vocab).itemsize <= MAX_BYTES


def folder_with_room(path: Path, n: int, n_vocab: int) -> Path | None:
    """Return the folder in which a reference of n scored tokens can be written, or None.

    path: path of the reference. If its folder cannot be written or has no room, the result is the folder for
    temporary files.
    """
    n_bytes = n * _row(n_vocab).itemsize
    folders = path.parent, Path(gettempdir())
    return next((f for f in folders if can_write(f) and free_disk_bytes(f / path.name) >= n_bytes), None)


class Scores(ABC):
    """Comparison of a run with the full cache, for all n tokens of a text except the first.

    `score` fills the arrays, batch by batch.

    nll: f64[n - 1], nll of the full cache in nats.
    kl: f64[n - 1], KL(full || run) in nats.
    same: b1[n - 1], True if the run and the full cache have the same most likely token. If several tokens are
    equally likely, the lowest id is used.
    """

    def __init__(self, n: int) -> None:
        self.n_done = 0
        self.nll, self.kl, self.same = np.zeros(n - 1), np.zeros(n - 1), np.zeros(n - 1, np.bool_)

    @abstractmethod
    def score(self, logits: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Compare the next batch of the text, and return its nll f64[n]. See `perplexity.Score`."""

    def _add(self, rows: np.ndarray, logits: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Compare logits with rows of a reference. Return the nll f64[n] under the logits."""
        part = slice(self.n_done, self.n_done + len(target))
        nll, top = np.empty(len(target)), np.empty(len(target), np.int32)
        # copy the arrays, because kernels refuse read-only arrays; np.ascontiguousarray would not copy a
        # single row
        tokens, log_p = (rows[name].copy() for name in ("tokens", "log_p"))
        divergence(logits, np.ascontiguousarray(target), tokens, log_p, nll, self.kl[part], top)
        self.nll[part] = rows["nll"]
        self.same[part] = rows["top"] == top
        self.n_done = part.stop
        return nll


class ReferenceReader(Scores):
    """Score against a reference of n - 1 predictions. Raises InputError if no reference of that size exists.

    The file is not memory-mapped, because its pages would increase the measured memory of this process.
    """

    def __init__(self, path: Path, n: int, n_vocab: int) -> None:
        super().__init__(n)
        self._row = _row(n_vocab)
        try:
            if path.stat().st_size != (n - 1) * self._row.itemsize:
                raise FileNotFoundError
            self._file = path.open("rb")
        except OSError:
            raise InputError("the full cache's predictions are gone; run the same command again") from None
        # mark the reference as recently used; in a read-only folder, it stays unmarked
        with suppress(OSError):
            os.utime(path)

    def score(self, logits: np.ndarray, target: np.ndarray) -> np.ndarray:
        rows = np.frombuffer(self._file.read(len(target) * self._row.itemsize), self._row)
        return self._add(rows, logits, target)

    def close(self) -> None:
        self._file.close()


class ReferenceWriter(Scores):
    """Score the full cache itself, and write its predictions to an open file as the reference."""

    def __init__(self, file: BinaryIO, n: int, n_vocab: int) -> None:
        super().__init__(n)
        self._file, self._row = file, _row(n_vocab)

    def score(self, logits: np.ndarray, target: np.ndarray) -> np.ndarray:
        rows = np.empty(len(target), self._row)
        n_top = rows["tokens"].shape[1]
        tokens = np.argpartition(logits, logits.shape[1] - n_top, axis=1)[:, -n_top:]
        # sort by id: then sums do not depend on argpartition's order, and memory is read in order
        tokens = np.sort(tokens, axis=1).astype(np.int32)
        top, log_p = np.empty(len(target), np.int32), np.empty(tokens.shape, np.float32)
        log_probs(logits, tokens, top, log_p)
        rows["nll"], rows["top"] = nll_of(logits, target), top
        rows["tokens"], rows["log_p"] = tokens, log_p
        try:
            self._file.write(rows.tobytes())
        except OSError as error:
            # name the file in the message about a full disk
            error.filename = self._file.name
            raise
        return self._add(rows, logits, target)


@contextmanager
def writing(path: Path, n: int, n_vocab: int) -> Iterator[Scores]:
    """Yield a `ReferenceWriter`. The file at `path` appears only when it is complete. Raises OSError.

    If another process has finished the file meanwhile, yield a `ReferenceReader` instead.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_suffix(".lock")):
        if path.exists():
            with closing(ReferenceReader(path, n, n_vocab)) as reader:
                yield reader
            return
        with replacing(path) as file:
            yield ReferenceWriter(file, n, n_vocab)
    _make_room(path)


def _row(n_vocab: int) -> np.dtype:
    n_top = min(N_TOP, n_vocab)
    return np.dtype([("nll", "<f8"), ("top", "<i4"), ("tokens", "<i4", n_top), ("log_p", "<f4", n_top)])


def _folder() -> Path:
    return cache_dir() / "logits"


def _make_room(newest: Path) -> None:
    """Delete the least recently used references, but never the newest, until MAX_BYTES is enough."""
    references = []
    for path in newest.parent.iterdir():
        # other processes may delete files meanwhile
        with suppress(OSError):
            references.append((path == newest, path.stat().st_mtime_ns, path.stat().st_size, path))
    total = sum(size for _, _, size, _ in references)
    for is_newest, _, size, path in sorted(references):
        if total <= MAX_BYTES or is_newest:
            return
        if size:
            with suppress(OSError):
                path.unlink()
            total -= size
