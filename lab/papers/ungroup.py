"""Write a model in which every query head has its own copy of its KV head: the same function, more rows.

    python -m lab.papers.ungroup SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct.Q4_1-ungrouped.gguf

The papers' models have no grouped queries.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from kvtool.models.resolve import resolve
from lab.benchmarks.common import make_parser

_REPEATED = tuple(f"attn_{kind}.{part}" for kind in "kv" for part in ("weight", "bias"))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("source", help="a name of models.txt or a path")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    ungroup(resolve(args.source), args.target)


def ungroup(source: Path, target: Path) -> None:
    """Write the model. Raises ValueError unless keys and values are separate tensors (llama, qwen2)."""
    reader = gguf.GGUFReader(source)
    if not any(tensor.name.endswith(_REPEATED) for tensor in reader.tensors):
        raise ValueError(f"{source.name} has no attn_k and attn_v tensors to repeat")
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    grouped = f"{arch}.attention.head_count_kv"
    n_head, n_head_kv = (reader.fields[key].contents() for key in (grouped.removesuffix("_kv"), grouped))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *of = field.types
        value = n_head if name == grouped else field.contents()
        writer.add_key_value(name, value, kind, *of[-1:])
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name.endswith(_REPEATED):
            heads = data.reshape(n_head_kv, -1, *data.shape[1:])
            data = np.repeat(heads, n_head // n_head_kv, axis=0).reshape(-1, *data.shape[1:])
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
