"""Random quantised checkpoints in safetensors, and the dense models that their formats' formulas make of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from conftest import byte_tokenizer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 257,
    "bos_token_id": None,
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
Made = dict[str, Tensor]  # tensors of a layer, by the last part of their names
Format = Callable[[int, int, torch.Generator], tuple[Made, Tensor]]  # from N, K to tensors and numbers (N, K)


def words(integers: Tensor, bits: int) -> Tensor:
    """Pack integers (..., n) into words of 32 bits (..., n x bits / 32), the first ones lowest."""
    split = integers.long().unflatten(-1, (-1, 32 // bits))
    whole = (split << (bits * torch.arange(32 // bits))).sum(-1)
    return (whole - ((whole >> 31) << 32)).int()


def drawn(
    outputs: int, inputs: int, group: int, bits: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Integers (N, K), zero points and positive scales (N, K / group)."""
    groups = inputs // group
    integers = torch.randint(1 << bits, (outputs, inputs), generator=generator)
    zeros = torch.randint(1, (1 << bits) - 1, (outputs, groups), generator=generator)
    scales = (0.5 + torch.rand(outputs, groups, generator=generator)) / (4 << bits)
    integers[0, :2] = torch.tensor([0, (1 << bits) - 1])
    return integers, zeros, scales


def numbers(integers: Tensor, zeros: Tensor | int, scales: Tensor, index: Tensor | None = None) -> Tensor:
    """The formula: scale x (integer - zero point), of the group of each input."""
    inputs = integers.shape[1]
    index = torch.arange(inputs) * scales.shape[1] // inputs if index is None else index.long()
    zero = zeros[:, index] if isinstance(zeros, Tensor) else zeros
    return scales.float()[:, index] * (integers - zero).float()


def awq(group: int = 64, scale: torch.dtype = torch.float16) -> Format:
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # AutoAWQ: nibble i is of output order[i]

    def made(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Made, Tensor]:
        integers, zeros, scales = drawn(outputs, inputs, inputs if group < 0 else group, 4, generator)
        scales = scales.to(scale)
        qweight, qzeros = (words(each.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4) for each in (integers, zeros))
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T}, numbers(integers, zeros, scales)

    return made


def gptq(bits: int = 4, group: int = 64, less: int = 1, symmetric: bool = False, act_order: bool = False) -> Format:
    def made(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Made, Tensor]:
        size = inputs if group < 0 else group
        integers, zeros, scales = drawn(outputs, inputs, size, bits, generator)
        zeros = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
        scales = scales.half()
        index = torch.arange(inputs) // size
        index = index[torch.randperm(inputs, generator=generator)] if act_order else index
        parts = {"qweight": words(integers, bits).T, "qzeros": words((zeros - less).T, bits)}
        return parts | {"scales": scales.T, "g_idx": index.int()}, numbers(integers, zeros, scales, index)

    return made


def pack_quantized(
    bits: int = 4, group: int = 32, symmetric: bool = True, scale: torch.dtype = torch.bfloat16, act_order: bool = False
) -> Format:
    def made(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Made, Tensor]:
        size = inputs if group < 0 else group
        integers, zeros, scales = drawn(outputs, inputs, size, bits, generator)
        scales, middle = scales.to(scale), 1 << (bits - 1)
        shape = torch.tensor([outputs, inputs])
        parts = {"weight_packed": words(integers, bits), "weight_scale": scales, "weight_shape": shape}
        if not symmetric:
            filled = nn.functional.pad(zeros, (0, 0, 0, -outputs % (32 // bits)))
            parts["weight_zero_point"] = words(filled.T, bits).T
        index = torch.arange(inputs) // size
        if act_order:
            parts["weight_g_idx"] = index = index[torch.randperm(inputs, generator=generator)].int()
        return parts, numbers(integers, middle if symmetric else zeros, scales, index)

    return made


def int_quantized(bits: int = 8, group: int = -1, symmetric: bool = True, tensor: bool = False) -> Format:
    def made(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Made, Tensor]:
        integers, zeros, scales = drawn(outputs, inputs, inputs if group < 0 else group, bits, generator)
        middle = 1 << (bits - 1)
        scales = scales[:1].bfloat16() if tensor else scales.bfloat16()
        parts = {"weight": (integers - middle).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            parts["weight_zero_point"] = (zeros - middle).to(torch.int8)
        wide = scales.expand(outputs, -1)
        return parts, numbers(integers, middle if symmetric else zeros, wide)

    return made


def fp8(block: tuple[int, int] = (128, 128), name: str = "weight_scale_inv", scalar: bool = False) -> Format:
    """(0, 0) is a whole matrix, (1, 0) a row."""

    def made(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Made, Tensor]:
        rows, columns = block[0] or outputs, block[1] or inputs
        weight = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        scales = 0.01 + 0.1 * torch.rand(-(-outputs // rows), -(-inputs // columns), generator=generator)
        wide = scales[torch.arange(outputs) // rows][:, torch.arange(inputs) // columns]
        return {"weight": weight, name: scales.view(()) if scalar else scales}, weight.float() * wide

    return made


@torch.no_grad()
def checkpoint(
    folder: Path,
    settings: Mapping[str, Any],
    form: Format,
    kind: str = "llama",
    dense: str = "lm_head",
    parts: int = 1,
    more: Mapping[str, Tensor | None] | None = None,
    **options: Any,
) -> Any:
    """Write a checkpoint with its tokenizer; return the dense model in float32.

    Args:
        dense: a pattern for the linear layers that are not quantised.
        parts: files.
        more: tensors that are added, or left out if they are None.
        options: of the configuration.
    """
    config, model = CLASSES[kind]
    torch.manual_seed(0)
    made = model(config(**{**SIZES, "initializer_range": 0.2, **options})).eval()
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor | None] = {name: weight.detach().half() for name, weight in made.named_parameters()}
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            tensors[name] = torch.randn(weight.shape, generator=generator).half()
    for path, weight in matrices(made):
        if not re.search(dense, path):
            stored, numbers_of = form(*weight.shape, generator)
            tensors |= {f"{path}.weight": None} | {f"{path}.{leaf}": each for leaf, each in stored.items()}
            weight.copy_(numbers_of)
    for name, weight in made.named_parameters():
        if weight.dim() == 3:
            del tensors[name]  # of all experts
        elif (given := tensors[name]) is not None and given.dtype == torch.float16:
            weight.copy_(given)
    tensors |= more or {}
    write(folder, {name: each for name, each in tensors.items() if each is not None}, parts)
    made.config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": dict(settings)}))
    byte_tokenizer().save_pretrained(folder)
    return made


def matrices(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of linear layers by the names of their modules, those of experts one by one."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield path, module.weight
        elif hasattr(module, "is_concatenated"):
            for expert, (both, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
                for name, weight in zip(("gate_proj", "up_proj", "down_proj"), (*both.chunk(2), down), strict=True):
                    yield f"{path}.{expert}.{name}", weight


def write(folder: Path, tensors: Mapping[str, Tensor], parts: int = 1) -> None:
    names = (
        [f"model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
        if parts > 1
        else ["model.safetensors"]
    )
    places = {name: names[number % parts] for number, name in enumerate(tensors)}
    for file in names:
        save_file({name: each.contiguous() for name, each in tensors.items() if places[name] == file}, folder / file)
    if parts > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
