"""Cache of each layer of a model: its kind (such as KV cells or a recurrent state) and its size in bytes."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvtool.errors import UsageError
from kvtool.models.gguf import constants
from kvtool.units import TYPE_NUMBERS

PAD = 256
"""llama.cpp rounds the number of cells of a cache up to a multiple of this number."""

_NO_BOUND = 2**31 - 1

ONLY_FULL = {
    "deepseek4": "it attends to compressed tokens, of which a cell holds several",
    "graniteswitch": "its router attends to the cache",
    "qwen4exp": "it reads earlier tokens from llama.cpp's own table of cells",
}
"""Architectures that run only with the policy `full`, which keeps all tokens. The values are the reasons."""


class Kind(IntEnum):
    """Kind of a layer's cache."""

    ROWS = 0
    """Cells for all tokens. The KV heads are rows, from which policies evict."""

    SLIDING = 1
    """Cells for the tokens of a sliding window (SWA)."""

    RECURRENT = 2
    """A recurrent state of fixed size."""

    INDEX = 3
    """Keys of an index. The model uses the index to select the cells that it attends to."""


class Layer(NamedTuple):
    """Cache of one layer. A layer with two kinds of cache is described by two `Layer` objects.

    Attributes
    ----------
    number
        Index of the layer among all layers of the model.
    owner
        `number` of the layer whose cells this layer reads: this layer or an earlier layer.
    head_size_k
        Dimension of a key of one head.
    head_size_v
        Dimension of a value of one head; 0 if values are part of the keys (MLA).
    recurrent_bytes
        Size of the recurrent state in bytes; 0 if the layer has none.
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
        """True unless the layer reads an earlier layer's cells."""
        return self.owner == self.number


@dataclass(frozen=True, slots=True)
class Layers:
    """All layers of a model that have a cache.

    The methods raise UsageError for a cache type that does not fit the model's heads.

    Attributes
    ----------
    all
        The layers. Layers of one kind are in the model's order.
    n_swa
        Size of the sliding window in tokens; 0 if no layer has a sliding window.
    max_cells
        Maximum number of cells of a row; 2^31 - 1 if the model has no index. The index selects this many
        cells for a query. In a larger row, it would leave out cells.
    n_group
        Maximum number of query heads per KV head in layers of kind `ROWS`.
    has_alibi
        True if attention decreases with distance (ALiBi).
    can_drop
        True if the last tokens of a step can be removed. Recurrent layers allow this only if llama.cpp keeps
        their states after each of these tokens.
    only_full
        Reason why the model runs only with the policy `full`; "" if it also runs with other policies.
    rope
        "M-RoPE" or "interleaved M-RoPE" if a token has several positions; "" if it has one.
    """

    all: tuple[Layer, ...]
    n_swa: int = 0
    max_cells: int = _NO_BOUND
    n_group: int = 1
    has_alibi: bool = False
    can_drop: bool = True
    only_full: str = ""
    rope: str = ""

    def of(self, kind: Kind) -> list[Layer]:
        return [layer for layer in self.all if layer.kind == kind]

    @property
    def n_row(self) -> int:
        """Number of rows: the KV heads of all layers that have their own cells for all tokens."""
        return sum(layer.n_head_kv for layer in self.of(Kind.ROWS) if layer.is_owner)

    @property
    def has_values(self) -> bool:
        """True if all rows store values; False if values are part of the keys (MLA)."""
        return all(layer.head_size_v > 0 for layer in self.of(Kind.ROWS))

    @property
    def has_index(self) -> bool:
        """True if the model uses an index to select cells."""
        return bool(self.of(Kind.INDEX))

    @property
    def can_stage(self) -> bool:
        """True if a step can attend to archived tokens that are copied to the device. See `ExactReader`."""
        return self.has_values or not self.has_index

    @property
    def n_shared(self) -> int:
        """Number of layers that read an earlier layer's cells."""
        return sum(not layer.is_owner for layer in self.all)

    @property
    def recurrent_bytes(self) -> int:
        """Size of all recurrent layers' states in bytes. It does not depend on the budget."""
        return sum(layer.recurrent_bytes for layer in self.all)

    @property
    def kinds(self) -> list[str]:
        """Features in addition to plain attention, such as "sliding windows" or "recurrent layers"."""
        features = {
            "sliding windows": bool(self.of(Kind.SLIDING)),
            "shared layers": self.n_shared > 0,
            "recurrent layers": bool(self.of(Kind.RECURRENT)),
            "latent attention (MLA)": not self.has_values,
            "an index": self.has_index,
            "ALiBi": self.has_alibi,
            self.rope: bool(self.rope),
        }
        return [name for name, is_present in features.items() if is_present]

    def cell_bytes(self, type_k: str = "f16", type_v: str = "f16") -> int:
        """Return the size of a token in all rows, in bytes: keys, values, and keys of an index."""
        return self._token_bytes(Kind.ROWS, type_k, type_v) + self._token_bytes(Kind.INDEX, type_k, type_v)

    def swa_bytes(self, n_batch: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """Return the size of the sliding layers' cache in bytes. It does not depend on the budget."""
        n_cell = -(-(self.n_swa + n_batch) // PAD) * PAD
        return n_cell * self._token_bytes(Kind.SLIDING, type_k, type_v)

    def fixed_bytes(self, n_batch: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """Return the size of the caches of sliding and recurrent layers, in bytes."""
        return self.swa_bytes(n_batch, type_k, type_v) + self.recurrent_bytes

    def cells_that_fit(self, n_bytes: int, n_batch: int, type_k: str = "f16", type_v: str = "f16") -> int:
        """Return how many cells fit into n_bytes after `fixed_bytes` are subtracted."""
        rest = n_bytes - self.fixed_bytes(n_batch, type_k, type_v)
        cell_bytes = self.cell_bytes(type_k, type_v)
        return max(rest, 0) // cell_bytes if cell_bytes else 0

    def cache_that_fits(
        self, n_bytes: int, n_ctx_train: int, n_batch: int, type_k: str = "f16", type_v: str = "f16"
    ) -> tuple[int, int]:
        """Return (cells, batch size) of the largest cache that fits into n_bytes.

        The number of cells is a multiple of PAD, unless it is n_ctx_train. It is 0 if n_bytes is too small
        for PAD cells and a batch of one token.

        n_batch: maximum batch size. Sliding layers need more memory for larger batches.
        """
        n_ctx_train = min(n_ctx_train, self.max_cells // PAD * PAD or self.max_cells)
        most = -(-n_ctx_train // PAD) * PAD
        most = min(self.cells_that_fit(n_bytes, 1, type_k, type_v) // PAD * PAD, most)
        for n in range(most, 0, -PAD):
            n_cell = min(n, n_ctx_train)
            batch = batch_within(n_cell, n_batch)
            if self.cells_that_fit(n_bytes, batch, type_k, type_v) >= n:
                return n_cell, batch
        # a cache with the usual batch does not fit; use the smallest cache, with the largest batch that fits
        n_cell = min(PAD, n_ctx_train)
        for batch in range(batch_within(n_cell, n_batch) if most else 0, 0, -1):
            if self.cells_that_fit(n_bytes, batch, type_k, type_v) >= PAD:
                return n_cell, batch
        return 0, 1

    def smallest_bytes(self, type_k: str = "f16", type_v: str = "f16") -> int:
        """Return the size in bytes of a cache with PAD cells and batches of one token."""
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
    """Return the batch size for a cache of n cells: n_batch, but at most a quarter of n."""
    return max(1, min(n_batch, n // 4))


def _head_bytes(which: str, cache_type: str, head_size: int) -> int:
    if cache_type not in TYPE_NUMBERS:
        types = ", ".join(TYPE_NUMBERS)
        raise UsageError(f"unknown cache type {cache_type!r} for {which}; choose one of {types}")
    block, block_bytes = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType[cache_type.upper()]]
    if head_size % block:
        raise UsageError(
            f"{which} cannot be {cache_type}: the model's head size of {head_size} "
            f"is not a multiple of {block}"
        )
    return head_size // block * block_bytes
