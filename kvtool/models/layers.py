"""What each layer of a model keeps from one token to the next, and how many bytes that takes."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvtool.errors import UsageError
from kvtool.models.gguf import constants
from kvtool.units import CACHE_TYPES

PAD = 256
"""llama.cpp rounds a cache up to a multiple of this many cells."""


_NO_BOUND = 2**31 - 1


class Kind(IntEnum):
    """What a layer keeps."""

    ROWS = 0
    """Cells for all tokens: its KV heads are rows, and policies act on them."""

    SLIDING = 1
    """Cells for the tokens in a sliding window (SWA)."""

    RECURRENT = 2
    """A state whose size never changes."""

    INDEX = 3
    """Beside cells for all tokens, keys by which the model chooses some of them."""


class Layer(NamedTuple):
    """A layer of the model, and what it keeps. A layer that keeps two things is there twice.

    Attributes
    ----------
    number
        Counted from 0 among all layers of the model.
    kind
        What it keeps.
    owner
        The layer whose cells it reads: itself, or an earlier one.
    n_head_kv
        KV heads.
    head_size_k
        Numbers in one key of one head.
    head_size_v
        Numbers in one value of one head; 0 where values are a part of the keys (MLA).
    recurrent_bytes
        Bytes of its state, if it is recurrent.
    """

    number: int
    kind: Kind
    owner: int
    n_head_kv: int
    head_size_k: int
    head_size_v: int
    recurrent_bytes: int

    @property
    def is_owner(self) -> bool:
        """Whether its cells are its own."""
        return self.owner == self.number


@dataclass(frozen=True, slots=True)
class Layers:
    """All layers of a model that keep something.

    Attributes
    ----------
    all
        The layers; those of one kind come in their order in the model.
    n_swa
        Tokens that sliding layers see; 0 if none slide.
    most_cells
        The most cells that a row may have: as many as the model's index chooses for a query, so that it has
        nothing to choose and need not know which tokens went. Without an index there is no bound.
    n_group
        The most query heads that share a KV head, among layers whose heads are rows.
    has_alibi
        Whether attention falls with distance (ALiBi).
    rope
        "M-RoPE" or "interleaved M-RoPE" where a token has several positions; "" where it has one.
    """

    all: tuple[Layer, ...]
    n_swa: int = 0
    most_cells: int = _NO_BOUND
    n_group: int = 1
    has_alibi: bool = False
    rope: str = ""

    def of(self, kind: Kind) -> list[Layer]:
        """The layers of one kind."""
        return [layer for layer in self.all if layer.kind == kind]

    @property
    def n_row(self) -> int:
        """Rows: KV heads of layers that keep cells for all tokens."""
        return sum(layer.n_head_kv for layer in self.of(Kind.ROWS) if layer.is_owner)

    @property
    def has_values(self) -> bool:
        """Whether all rows have values of their own; False where these are a part of the keys (MLA)."""
        return all(layer.head_size_v > 0 for layer in self.of(Kind.ROWS))

    @property
    def has_index(self) -> bool:
        """Whether the model chooses among its cells by an index."""
        return bool(self.of(Kind.INDEX))

    @property
    def n_shared(self) -> int:
        """Layers that read an earlier layer's cells."""
        return sum(not layer.is_owner for layer in self.all)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of all recurrent layers' states, whatever the budget. A policy's are not among them."""
        return sum(layer.recurrent_bytes for layer in self.all)

    @property
    def kinds(self) -> list[str]:
        """What a model is, beside plain attention: "sliding windows", "recurrent layers", and so on."""
        found = {
            "sliding windows": bool(self.of(Kind.SLIDING)),
            "shared layers": self.n_shared > 0,
            "recurrent layers": bool(self.of(Kind.RECURRENT)),
            "latent attention (MLA)": not self.has_values,
            "an index": self.has_index,
            "ALiBi": self.has_alibi,
            self.rope: bool(self.rope),
        }
        return [name for name, is_there in found.items() if is_there]

    def cell_bytes(self, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes of one token's keys and values in all rows, and of its keys in an index.

        Raises UsageError for a type that does not fit the model's heads.
        """
        return self._token_bytes(Kind.ROWS, type_k, type_v) + self._token_bytes(Kind.INDEX, type_k, type_v)

    def swa_bytes(self, n_batch: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes of the sliding layers' cache. It does not grow with the cells of the rows.

        n_batch: the most tokens of a batch. Raises UsageError for a type that does not fit.
        """
        n_cell = -(-(self.n_swa + n_batch) // PAD) * PAD
        return n_cell * self._token_bytes(Kind.SLIDING, type_k, type_v)

    def fixed_bytes(self, n_batch: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes of what a model keeps beside its rows. Raises UsageError for a type that does not fit."""
        return self.swa_bytes(n_batch, type_k, type_v) + self.recurrent_bytes

    def cells_that_fit(self, n_bytes: int, n_batch: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """How many cells fit into n_bytes beside what is not rows. Raises UsageError as cell_bytes does."""
        rest = n_bytes - self.fixed_bytes(n_batch, type_k, type_v)
        cell_bytes = self.cell_bytes(type_k, type_v)
        return max(rest, 0) // cell_bytes if cell_bytes else 0

    def cache_that_fits(
        self, n_bytes: int, n_ctx_train: int, n_batch: int, type_k: str = "f16", type_v: str = "f16"
    ) -> tuple[int, int]:
        """Cells of the largest cache in n_bytes, a multiple of PAD or n_ctx_train, and the batch beside it.

        n_batch: the largest batch wanted; it takes room in sliding layers. 0 cells if even a batch of one
        token leaves too little. Raises UsageError as cell_bytes does.
        """
        n_ctx_train = min(n_ctx_train, self.most_cells // PAD * PAD or self.most_cells)
        most = -(-n_ctx_train // PAD) * PAD
        most = min(self.cells_that_fit(n_bytes, 1, type_k, type_v) // PAD * PAD, most)
        for n in range(most, 0, -PAD):
            n_cell = min(n, n_ctx_train)
            batch = batch_within(n_cell, n_batch)
            if self.cells_that_fit(n_bytes, batch, type_k, type_v) >= n:
                return n_cell, batch
        # rather a slow prompt than none
        n_cell = min(PAD, n_ctx_train)
        for batch in range(batch_within(n_cell, n_batch) if most else 0, 0, -1):
            if self.cells_that_fit(n_bytes, batch, type_k, type_v) >= PAD:
                return n_cell, batch
        return 0, 1

    def smallest_bytes(self, type_k: str = "f16", type_v: str = "f16") -> int:
        """Bytes of the smallest cache: PAD cells, batches of one token. Raises UsageError."""
        return PAD * self.cell_bytes(type_k, type_v) + self.fixed_bytes(1, type_k, type_v)

    def _token_bytes(self, kind: Kind, type_k: str, type_v: str) -> int:
        if type_k != type_v and not self.has_values:
            raise UsageError(
                f"--cache-type-k and --cache-type-v must be the same, not {type_k} and {type_v}: "
                "values of this model are a part of its keys (MLA)"
            )
        return sum(
            layer.n_head_kv
            * (_head_bytes("K", type_k, layer.head_size_k) + _head_bytes("V", type_v, layer.head_size_v))
            for layer in self.of(kind)
            if layer.is_owner
        )


def batch_within(n: int, n_batch: int) -> int:
    """The largest batch for a cache of n cells that is bounded in bytes: the batch needs room in it too."""
    return max(1, min(n_batch, n // 4))


def _head_bytes(which: str, cache_type: str, head_size: int) -> int:
    if cache_type not in CACHE_TYPES:
        types = ", ".join(CACHE_TYPES)
        raise UsageError(f"unknown cache type {cache_type!r} for {which}; choose one of {types}")
    block, block_bytes = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType[cache_type.upper()]]
    if head_size % block:
        raise UsageError(
            f"{which} cannot be {cache_type}: the model's head size of {head_size} "
            f"is not a multiple of {block}"
        )
    return head_size // block * block_bytes
