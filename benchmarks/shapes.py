"""A GGUF file of random weights in the shapes of a real model, to time passes of sizes that one need not have.

    python benchmarks/shapes.py qwen2.5-3b --tokenizer qwen2.5-coder-0.5b.gguf out/3b.gguf
    python benchmarks/passes.py --target out/3b.gguf

Matrices are Q4_K, those of values, of "down" and of the head Q6_K, as in files of Q4_K_M, but in every layer.
Tokenizer and vocabulary are those of the given file, so the head is as large as it is there.  Texts are noise.  What a
layer adds to the states is small, else rounding would grow from layer to layer until no two passes agree.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

SEED = 0
ADDED = 0.1  # of a layer, in place of 1: the size of matrices that add to the states
# where float16 numbers of a block stand, and what weights of deviation 1 have there: integers and factors are random
SCALES = {
    gguf.GGMLQuantizationType.Q4_K: ((0, 1 / 225), (2, 7.5 / 225)),  # so that their mean is 0
    gguf.GGMLQuantizationType.Q6_K: ((208, 1 / 1370),),
}


class Shape(NamedTuple):
    """A model's sizes, as GGUF files name them."""

    architecture: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    heads_kv: int
    tied: bool
    theta: float = 1e6


SHAPES = {
    "tiny": Shape("llama", 2, 256, 512, 4, 2, tied=False),
    "qwen2.5-3b": Shape("qwen2", 36, 2048, 11008, 16, 2, tied=True),
    "llama-3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, tied=False, theta=5e5),
}


def matrices(shape: Shape, vocabulary: int) -> Iterator[tuple[str, int, int, bool]]:
    """Yield the matrices: name, outputs, inputs, whether they have 6 bits."""
    hidden, narrow = shape.hidden, shape.hidden // shape.heads * shape.heads_kv
    yield "token_embd", vocabulary, hidden, shape.tied
    if not shape.tied:
        yield "output", vocabulary, hidden, True
    for layer in range(shape.layers):
        name = f"blk.{layer}"
        yield f"{name}.attn_q", hidden, hidden, False
        yield f"{name}.attn_k", narrow, hidden, False
        yield f"{name}.attn_v", narrow, hidden, True
        yield f"{name}.attn_output", hidden, hidden, False
        yield f"{name}.ffn_gate", shape.feed_forward, hidden, False
        yield f"{name}.ffn_up", shape.feed_forward, hidden, False
        yield f"{name}.ffn_down", hidden, shape.feed_forward, True


def blocks(outputs: int, inputs: int, six: bool, size: float, generator: np.random.Generator) -> np.ndarray:
    """Return random blocks (outputs, bytes of a row); products have about this size times that of their states."""
    kind = gguf.GGMLQuantizationType.Q6_K if six else gguf.GGMLQuantizationType.Q4_K
    weights, octets = gguf.GGML_QUANT_SIZES[kind]
    found = generator.integers(256, size=(outputs * inputs // weights, octets), dtype=np.uint8)
    deviations = size / inputs**0.5 * (0.5 + generator.random(len(found)))
    for start, scale in SCALES[kind]:
        found[:, start : start + 2] = (scale * deviations).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return found.reshape(outputs, -1)


def write(shape: Shape, tokenizer: Path, path: Path) -> None:
    """Write a file, a tensor after another."""
    from specinfer.attention.packed.gguf import open_gguf

    given, name = open_gguf(tokenizer), shape.architecture
    tokens = given.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    writer = gguf.GGUFWriter(path, name, use_temp_file=True)
    writer.add_context_length(32768)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.theta)
    for key, value in given.metadata.items():
        if key.startswith("tokenizer."):
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    generator = np.random.default_rng(SEED)
    vocabulary = given.tensors["token_embd.weight"].shape[0]
    for matrix, outputs, inputs, six in matrices(shape, vocabulary):
        kind = gguf.GGMLQuantizationType.Q6_K if six else gguf.GGMLQuantizationType.Q4_K
        size = ADDED if matrix.endswith(("attn_output", "ffn_down")) else 1.0
        writer.add_tensor(f"{matrix}.weight", blocks(outputs, inputs, six, size, generator), raw_dtype=kind)
        if shape.architecture == "qwen2" and matrix.endswith(("attn_q", "attn_k", "attn_v")):
            writer.add_tensor(f"{matrix}.bias", np.zeros(outputs, np.float32))
    norms = [f"blk.{layer}.{norm}" for layer in range(shape.layers) for norm in ("attn_norm", "ffn_norm")]
    for norm in (*norms, "output_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(shape.hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file")
    args = parser.parse_args()
    write(SHAPES[args.shape], args.tokenizer, args.path)


if __name__ == "__main__":
    main()
