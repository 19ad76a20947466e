"""Write a GGUF file with random Q4_0 weights in the shape of an 8B model, to measure speed and bytes.

    python benchmarks/random_model.py 8b.gguf
    python benchmarks/overhead.py wiki.test.raw -m 8b.gguf --budget 512 --long 32768

It has 32 layers, 32 query heads and 8 KV heads of 128 dimensions, as Llama 3.1 8B; 4.2 GB. The tokenizer
comes from another model (-m), so that it can read texts; with its smaller vocabulary there are 7.4B weights.
What the model writes means nothing. Its speed is that of any model with these shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from common import make_parser, note

from kvtool.models.resolve import resolve

BLOCK, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_0]
CODE_STD = float(np.std(np.arange(16)))
"""The codes 0 .. 15 are equally likely."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "-m",
        "--model",
        help="take the tokenizer of this model: a name of models.txt or a path (default: kvtool's)",
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ff", type=int, default=14336, help="inner size of the feed-forward layers")
    parser.add_argument("--n-ctx", type=int, default=131072, help="trained context in the header")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    n_embd = args.heads * args.head_dim
    for name, size in (("heads x head-dim", n_embd), ("ff", args.ff)):
        if size % BLOCK:
            parser.error(f"{name} must be a multiple of {BLOCK}, got {size}")
    if args.heads % args.kv_heads:
        parser.error(f"heads must be a multiple of kv-heads ({args.kv_heads}), got {args.heads}")
    reader = gguf.GGUFReader(resolve(args.model))
    writer = gguf.GGUFWriter(args.out, "llama")
    writer.add_name(args.out.stem)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_block_count(args.layers)
    writer.add_context_length(args.n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(args.ff)
    writer.add_head_count(args.heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_rope_dimension_count(args.head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    n_vocab = add_tokenizer(reader, writer)
    rng = np.random.default_rng(args.seed)
    matrices = dict(shapes(args, n_embd, n_vocab))
    for name, shape in matrices.items():
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            n_row, n_in = shape
            stored = (n_row, n_in // BLOCK * BLOCK_BYTES)
            writer.add_tensor_info(
                name, stored, np.dtype(np.uint8), stored[0] * stored[1], gguf.GGMLQuantizationType.Q4_0
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # one tensor at a time, so the model need not fit into memory
    for shape in matrices.values():
        writer.write_tensor_data(np.ones(shape, np.float32) if len(shape) == 1 else quantized(rng, *shape))
    writer.close()
    n_weight = sum(int(np.prod(shape)) for shape in matrices.values())
    note(f"{args.out}: {n_weight / 1e9:.2f}B weights, {args.out.stat().st_size / 1e9:.2f} GB")


def add_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    """Copy everything that a header says about its tokenizer. Returns the size of the vocabulary."""
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer."):
            continue
        if field.types[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, field.contents(), field.types[0])
        elif len(field.data):  # the writer cannot write an empty array
            writer.add_key_value(key, field.contents(), gguf.GGUFValueType.ARRAY, field.types[-1])
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_vocab_size(n_vocab)
    return n_vocab


def shapes(args: argparse.Namespace, n_embd: int, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor; matrices are [out, in]."""
    n_kv = args.kv_heads * args.head_dim
    yield "token_embd.weight", (n_vocab, n_embd)
    yield "output_norm.weight", (n_embd,)
    yield "output.weight", (n_vocab, n_embd)
    for layer in range(args.layers):
        for name, shape in {
            "attn_norm": (n_embd,),
            "attn_q": (n_embd, n_embd),
            "attn_k": (n_kv, n_embd),
            "attn_v": (n_kv, n_embd),
            "attn_output": (n_embd, n_embd),
            "ffn_norm": (n_embd,),
            "ffn_gate": (args.ff, n_embd),
            "ffn_up": (args.ff, n_embd),
            "ffn_down": (n_embd, args.ff),
        }.items():
            yield f"blk.{layer}.{name}.weight", shape


def quantized(rng: np.random.Generator, n_row: int, n_in: int) -> np.ndarray:
    """Random blocks of Q4_0, u8[n_row, bytes]. The product with a vector has entries of about its size."""
    blocks = rng.integers(0, 256, (n_row, n_in // BLOCK, BLOCK_BYTES), np.uint8)
    scale = np.array([1 / (CODE_STD * n_in**0.5)], np.float16)
    blocks[..., :2] = scale.view(np.uint8)
    return blocks.reshape(n_row, -1)


if __name__ == "__main__":
    main()
