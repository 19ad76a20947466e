"""Choose which weights to place on a GPU if its memory is too small for all of them."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

_LAYER = re.compile(r"blk\.(\d+)(\..*)")

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Pattern for the names of routed experts' weights, from llama.cpp's --cpu-moe.

Shared experts have other names.
"""


class Weights(NamedTuple):
    """Sizes of a model's weights in bytes.

    dense: size of each layer without its experts. The last `n_mtp` layers are for multi-token prediction
    (MTP).
    experts: size of each layer's experts; 0 in layers without experts.
    output: size of the tensors after the last layer. A model without an output matrix uses a copy of its
    token embeddings instead. This size includes the copy. llama.cpp leaves the original in host memory.
    """

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    output: int
    names: frozenset[str] = frozenset()
    n_mtp: int = 0

    @classmethod
    def of(cls, tensors: Mapping[str, int], n_layer: int, n_mtp: int = 0) -> "Weights":
        """Sum up the sizes of tensors by layer. The last n_mtp of the n_layer layers are for MTP."""
        dense, experts, output = [0] * n_layer, [0] * n_layer, 0
        for name, n_bytes in tensors.items():
            layer = _LAYER.match(name)
            if not layer:
                output += n_bytes if name.startswith("output") else 0
            elif (i := int(layer[1])) < n_layer:
                (experts if re.match(EXPERTS, layer[2]) else dense)[i] += n_bytes
        if "output.weight" not in tensors:
            output += tensors.get("token_embd.weight", 0)
        return cls(tuple(dense), tuple(experts), output, frozenset(tensors), n_mtp)

    @property
    def n_layer(self) -> int:
        """Number of layers. llama.cpp counts MTP layers even if it does not load them."""
        return len(self.dense)

    def without_mtp(self) -> "Weights":
        """Return the weights that are loaded if MTP is off. The size of MTP layers is 0."""
        n, none = self.n_layer - self.n_mtp, (0,) * self.n_mtp
        return self._replace(dense=self.dense[:n] + none, experts=self.experts[:n] + none)


class PlacedWeights(NamedTuple):
    """Place of a model's weights.

    n_gpu_layers: number of layers on the GPU, counted from the end. The output is counted as the last layer.
    n_cpu_moe: number of layers whose experts stay in host memory, counted from the first layer.
    gpu_bytes: bytes of weights and cache on the GPU.
    """

    n_gpu_layers: int
    n_cpu_moe: int
    gpu_bytes: int


def place(weights: Weights, cache_bytes: Sequence[int], free_bytes: int) -> PlacedWeights:
    """Place as many weights as fit on the GPU: first the layers without their experts, then experts.

    Experts come last, because a token uses few of them. llama.cpp counts the layers on the GPU from the last
    layer. Layers and experts are therefore placed from the last layer to the first.

    cache_bytes: bytes of each layer's cache, which is always on the same device as the layer.
    free_bytes: bytes of device memory for weights and cache.
    """
    n = weights.n_layer
    dense = [one + other for one, other in zip(weights.dense, cache_bytes, strict=True)]
    n_dense, n_bytes = _fitting([weights.output, *reversed(dense)], free_bytes)
    # if a layer does not fit on the GPU, all experts stay in host memory
    n_expert, n_expert_bytes = 0, 0
    if n_dense == n + 1:
        n_expert, n_expert_bytes = _fitting([*reversed(weights.experts)], free_bytes - n_bytes)
    n_cpu_moe = n - n_expert if any(weights.experts[: n - n_expert]) else 0
    return PlacedWeights(n_dense, n_cpu_moe, n_bytes + n_expert_bytes)


def _fitting(sizes: Sequence[int], n_bytes: int) -> tuple[int, int]:
    """Return how many sizes fit into n_bytes, counted from the first, and the sum of these sizes."""
    sums = [each for each in accumulate(sizes) if each <= n_bytes]
    return len(sums), sums[-1] if sums else 0
