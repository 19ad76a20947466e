"""Loops: replies that repeat one block of tokens without end.

A reply loops if it ends with a block of at most `MAX_BLOCK` tokens that occurs at least `MIN_TIMES` times
in a row. All occurrences together must have at least `MIN_TOKENS` tokens. If the block has no letters, they
must have at least `MIN_SIGNS` tokens, because an answer may contain a long matrix of zeros. The rule is
strict, so that lists, tables and code do not match it.
"""

from __future__ import annotations

import numpy as np

MAX_BLOCK, MIN_TIMES = 128, 8
MIN_TOKENS, MIN_SIGNS = 512, 1024

_BLOCKS = np.arange(1, MAX_BLOCK + 1)


class Loop:
    """Detector of a loop in the tokens of one reply.

    Attributes
    ----------
    n_block
        Number of tokens of the shortest repeated block; 0 without a loop.
    n_times
        Number of complete occurrences of the block in a row; 0 without a loop.
    """

    def __init__(self) -> None:
        self.n_block = self.n_times = 0
        # last tokens of the reply, newest first
        self._recent = np.full(MAX_BLOCK, -1, np.int64)
        # for each block size n: number of newest tokens in a row that equal the token n places earlier
        self._n_same = np.zeros(MAX_BLOCK, np.int64)
        # number of tokens since the last token with a letter
        self._n_sign = 0

    def add(self, token: int, piece: bytes) -> bool:
        """Add the next token of the reply and its text; return True if the reply loops.

        Bytes outside ASCII count as letters.
        """
        self._n_sign = 0 if any(byte >= 0x80 or chr(byte).isalpha() for byte in piece) else self._n_sign + 1
        self._n_same = np.where(self._recent == token, self._n_same + 1, 0)
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token
        least = np.where(self._n_sign < _BLOCKS, MIN_TOKENS, MIN_SIGNS)
        n_token = self._n_same + _BLOCKS
        loops = np.flatnonzero(n_token >= np.maximum(least, _BLOCKS * MIN_TIMES))
        if len(loops):
            self.n_block = int(_BLOCKS[loops[0]])
            self.n_times = int(n_token[loops[0]]) // self.n_block
        return bool(len(loops))
