"""Write a GGUF file with random Q4_0 weights in the shape of an 8B model, to measure speed and bytes.

    python -m lab.benchmarks.random_model 8b.gguf
    python -m lab.benchmarks.overhead wiki.test.raw -m 8b.gguf --budget 512 --long 32768

The model has 32 layers, 32 query heads and 8 KV heads with 128 dimensions, like Llama 3.1 8B. The file has
4.2 GB. The tokenizer is copied from another model (-m). Its vocabulary is smaller than Llama's, so the file
has only 7.4B weights. The model's output is meaningless, but its speed is the same as that of any model with
these shapes.

With --arch gemma3, every sixth layer attends to all tokens, and all other layers attend to the newest 1,024
tokens. With --arch qwen35, every fourth layer has attention, and all other layers are recurrent.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from kvtool.models.resolve import resolve
from lab.benchmarks.common import make_parser, note

N_CONV, N_STATE = 4, 128
"""Sizes of Qwen 3.5's recurrent layers: number of tokens that a convolution spans, dimensions of a head."""

BLOCK, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_0]
CODE_STD = float(np.std(np.arange(16)))
"""Standard deviation of the codes 0 to 15, which are all equally likely."""

N_REPEATED = 256
"""With --repeat: number of random rows in each matrix. The other rows repeat these rows."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "-m",
        "--model",
        help="take the tokenizer of this model: a name of models.txt or a path (default: kvtool's)",
    )
    parser.add_argument("--arch", choices=("llama", "gemma3", "qwen35"), default="llama")
    parser.add_argument("--chat-template", type=Path, help="a file; default: that of the tokenizer's model")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--groups", type=int, default=2, help="key heads of a recurrent layer; Qwen 3.5 has 16"
    )
    parser.add_argument("--ff", type=int, default=14336, help="inner size of the feed-forward layers")
    parser.add_argument("--n-ctx", type=int, default=131072, help="trained context in the header")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--repeat", action="store_true", help="repeat 256 random rows in each matrix, which takes less time"
    )
    args = parser.parse_args()
    n_embd = args.heads * args.head_dim
    for name, size in (("heads x head-dim", n_embd), ("ff", args.ff)):
        if size % BLOCK:
            parser.error(f"{name} must be a multiple of {BLOCK}, got {size}")
    if args.heads % args.kv_heads:
        parser.error(f"heads must be a multiple of kv-heads ({args.kv_heads}), got {args.heads}")
    reader = gguf.GGUFReader(resolve(args.model))
    writer = gguf.GGUFWriter(args.out, args.arch)
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
    writer.add_key_length(args.head_dim)
    writer.add_value_length(args.head_dim)
    if args.arch == "gemma3":
        writer.add_sliding_window(1024)
        writer.add_sliding_window_pattern(6)
    elif args.arch == "qwen35":
        writer.add_rope_dimension_sections([args.head_dim // 6, args.head_dim // 6, args.head_dim // 6, 0])
        writer.add_full_attention_interval(4)
        writer.add_ssm_conv_kernel(N_CONV)
        writer.add_ssm_state_size(N_STATE)
        writer.add_ssm_group_count(args.groups)
        writer.add_ssm_time_step_rank(2 * args.groups)
        writer.add_ssm_inner_size(2 * args.groups * N_STATE)
    n_vocab = add_tokenizer(reader, writer, args.chat_template)
    rng = np.random.default_rng(args.seed)
    matrices = dict(shapes(args, n_embd, n_vocab))
    for name, shape in matrices.items():
        if is_plain(shape):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            n_row, n_in = shape
            stored = (n_row, n_in // BLOCK * BLOCK_BYTES)
            writer.add_tensor_info(
                name, stored, np.dtype(np.uint8), stored[0] * stored[1], gguf.GGMLQuantizationType.Q4_0
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # write one tensor at a time, because the model may not fit into memory
    for name, shape in matrices.items():
        # ssm_a, the decay of a recurrent layer, is negative
        plain = np.full(shape, -1 if name.endswith("ssm_a") else 1, np.float32) if is_plain(shape) else None
        writer.write_tensor_data(
            quantized(rng, *shape, N_REPEATED if args.repeat else None) if plain is None else plain
        )
    writer.close()
    n_weight = sum(int(np.prod(shape)) for shape in matrices.values())
    note(f"{args.out}: {n_weight / 1e9:.2f}B weights, {args.out.stat().st_size / 1e9:.2f} GB")


def is_plain(shape: tuple[int, ...]) -> bool:
    """Return True if a tensor is stored as F32: norms, and matrices whose rows are not whole blocks."""
    return len(shape) == 1 or bool(shape[1] % BLOCK)


def add_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, template: Path | None) -> int:
    """Copy all header fields of the tokenizer. Return the size of the vocabulary."""
    if template:
        writer.add_chat_template(template.read_text(encoding="utf-8"))
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer.") or (template and key == "tokenizer.chat_template"):
            continue
        if field.types[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, field.contents(), field.types[0])
        elif len(field.data):  # the writer cannot write an empty array
            writer.add_key_value(key, field.contents(), gguf.GGUFValueType.ARRAY, field.types[-1])
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    writer.add_vocab_size(n_vocab)
    return n_vocab


def shapes(args: argparse.Namespace, n_embd: int, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of every tensor. The shape of a matrix is [out, in]."""
    n_kv = args.kv_heads * args.head_dim
    yield "token_embd.weight", (n_vocab, n_embd)
    yield "output_norm.weight", (n_embd,)
    yield "output.weight", (n_vocab, n_embd)
    mlp = {"ffn_gate": (args.ff, n_embd), "ffn_up": (args.ff, n_embd), "ffn_down": (n_embd, args.ff)}
    # Qwen 3.5 has a gate next to each query
    n_query = n_embd * (2 if args.arch == "qwen35" else 1)
    attention: dict[str, tuple[int, ...]] = {
        "attn_q.weight": (n_query, n_embd),
        "attn_k.weight": (n_kv, n_embd),
        "attn_v.weight": (n_kv, n_embd),
        "attn_output.weight": (n_embd, n_embd),
    }
    more = {"llama": ["ffn_norm"], "gemma3": ["ffn_norm", "post_attention_norm", "post_ffw_norm"]}
    norms = ["attn_norm", *more.get(args.arch, ["post_attention_norm"])]
    if args.arch != "llama":
        attention |= {"attn_q_norm.weight": (args.head_dim,), "attn_k_norm.weight": (args.head_dim,)}
    for layer in range(args.layers):
        recurs = args.arch == "qwen35" and (layer + 1) % 4
        base = {f"{name}.weight": (n_embd,) for name in norms} | {f"{name}.weight": mlp[name] for name in mlp}
        for name, shape in (base | (recurrent(n_embd, args.groups) if recurs else attention)).items():
            yield f"blk.{layer}.{name}", shape


def recurrent(n_embd: int, n_group: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a gated delta net."""
    n_head = 2 * n_group
    n_value = n_head * N_STATE
    n_mixed = 2 * n_group * N_STATE + n_value
    return {
        "attn_qkv.weight": (n_mixed, n_embd),
        "attn_gate.weight": (n_value, n_embd),
        "ssm_conv1d.weight": (n_mixed, N_CONV),
        "ssm_dt.bias": (n_head,),
        "ssm_a": (n_head,),
        "ssm_beta.weight": (n_head, n_embd),
        "ssm_alpha.weight": (n_head, n_embd),
        "ssm_norm.weight": (N_STATE,),
        "ssm_out.weight": (n_embd, n_value),
    }


def quantized(rng: np.random.Generator, n_row: int, n_in: int, n_random: int | None = None) -> np.ndarray:
    """Return random Q4_0 blocks, u8[n_row, bytes], of a matrix.

    The blocks are scaled so that the product of the matrix with a vector has numbers of about the same size
    as the vector. n_random: number of random rows, which the other rows repeat. If it is None, all rows are
    random.
    """
    blocks = rng.integers(0, 256, (min(n_random or n_row, n_row), n_in // BLOCK, BLOCK_BYTES), np.uint8)
    scale = np.array([1 / (CODE_STD * n_in**0.5)], np.float16)
    blocks[..., :2] = scale.view(np.uint8)
    rows = blocks.reshape(len(blocks), -1)
    return rows if len(rows) == n_row else np.resize(rows, (n_row, rows.shape[1]))


if __name__ == "__main__":
    main()
