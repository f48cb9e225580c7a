"""The packed layout and its products: the same numbers as in the file, the same bits in every product."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_packed_formats import HALVES, random_rows
from torch import Tensor, nn

from specinfer.attention.packed import products
from specinfer.attention.packed.formats import KINDS, Quantised, numbers, quantised
from specinfer.attention.packed.layout import is_narrow, narrow, pack, unpack
from specinfer.attention.packed.modules import PackedEmbedding, PackedLinear
from specinfer.common import native

OUTPUTS, INPUTS = 77, 768  # the last block of 32 outputs is not full
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma"]  # without VNNI
TILES = f'-DSPECINFER_EMULATED_TILES="{Path(__file__).with_name("emulated_tiles.h")}"', "-D__AMX_INT8__"
OTHERS = {"AVX2": ["-mavx2", "-mfma", "-mf16c"], "AVX512": AVX512, "tiles": [*AVX512, "-mavx512vnni", *TILES]}


def plain_rows(kind: str, count: int = OUTPUTS) -> Tensor:
    """Rows of random blocks whose scales are of one size, as in models."""
    rows = random_rows(kind, count, INPUTS // KINDS[kind].inputs).view(count, -1, KINDS[kind].size)
    generator = torch.Generator().manual_seed(1)
    for at in HALVES[kind]:
        halves = 0.001 + 0.02 * torch.rand(*rows.shape[:2], 1, generator=generator)
        rows[..., at : at + 2] = halves.half().view(torch.uint8)
    if kind == "MXFP4":
        rows[..., 0] = torch.randint(118, 124, rows.shape[:2], generator=generator)
    return rows.flatten(1)


def packed_of(kind: str, rows: Tensor) -> Tensor:
    return pack((quantised(kind, part) for part in rows.split(64)), len(rows), INPUTS)


def narrowed(packed: Tensor) -> Tensor:
    """The same matrix, whose products round states to 8 bits."""
    found = packed.clone()
    narrow(found)
    return found


SPANS = {  # inputs that share a float32 scale, bits, whether factors make minima of scales
    "32 inputs": (32, 4, False),
    "32 inputs, minima": (32, 4, True),
    "256 inputs, 8 bits": (256, 8, False),
    "128 inputs, minima": (128, 4, True),
    "256 inputs, minima, 8 bits": (256, 8, True),
}


def spanned(name: str, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Quantised:
    """A matrix as checkpoints in safetensors have it."""
    group, bits, minima = SPANS[name]
    generator, groups = torch.Generator().manual_seed(3), inputs // group
    integers = torch.randint(1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scale = (0.001 + 0.02 * torch.rand(outputs, groups, generator=generator)).bfloat16().float()
    middle = 1 << (bits - 1)
    factor = torch.randint(-middle, middle + 1, (outputs, groups), generator=generator, dtype=torch.int16)
    return Quantised(integers, bits, middle, None, group, scale, None, None, factor if minima else None)


def states_of(count: int) -> Tensor:
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=["compiled", "torch"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(products, "library", lambda: None)
    elif products.library() is None:
        pytest.skip("no C++ compiler")
    return str(request.param)


@pytest.mark.parametrize("kind", HALVES)
def test_what_is_packed_comes_back(kind: str) -> None:
    rows = random_rows(kind, OUTPUTS, INPUTS // KINDS[kind].inputs)
    (found,) = unpack(packed_of(kind, rows), INPUTS)
    for part, wanted in zip(found, quantised(kind, rows), strict=True):
        if isinstance(wanted, Tensor):
            assert part.dtype == wanted.dtype
            assert torch.equal(part.view(torch.uint8), wanted.contiguous().view(torch.uint8))
        else:
            assert part == wanted


@pytest.mark.parametrize("kind", HALVES)
def test_a_packed_matrix_is_no_larger_than_its_rows_but_for_bytes_of_scales(kind: str) -> None:
    rows = plain_rows(kind, 1024)
    more = {"Q4_K": 0.125, "Q5_K": 0.125, "Q3_K": 0.125, "IQ4_XS": 0.0625, "MXFP4": 0.75, "Q2_K": 0.5}
    more |= {"TQ1_0": 0.4375, "TQ2_0": 0.0625}
    packed, weights = packed_of(kind, rows), rows.shape[0] * INPUTS
    assert 8 * packed.numel() / weights <= 8 * rows.numel() / weights + more.get(kind, 0) + 0.1  # heads, tables


@pytest.mark.parametrize("kind", HALVES)
def test_rows_are_the_numbers_of_the_file(kind: str, library: str) -> None:
    rows = random_rows(kind, OUTPUTS, INPUTS // KINDS[kind].inputs)
    packed, wanted = packed_of(kind, rows), numbers(quantised(kind, rows))
    for ids in (
        torch.tensor([[0, 76, 31], [32, 5, 5]]),
        torch.tensor([33, 1]),
        torch.tensor(64),
        torch.tensor([]).long(),
    ):
        found = products.rows_of(ids, packed, INPUTS)
        assert torch.equal(found.view(torch.int32), wanted[ids].view(torch.int32))


@pytest.mark.parametrize("row", [-1, OUTPUTS])
def test_a_row_that_is_not_there_is_an_error(row: int, library: str) -> None:
    with pytest.raises(IndexError, match="of a matrix of 77 rows"):
        products.rows_of(torch.tensor([0, row]), packed_of("Q4_0", plain_rows("Q4_0")), INPUTS)


@pytest.mark.parametrize("kind", HALVES)
def test_products_are_near_those_of_float64(kind: str, library: str) -> None:
    rows, states = plain_rows(kind), states_of(5)
    wanted = states.double() @ numbers(quantised(kind, rows)).double().T
    found = products.linear(states, [packed_of(kind, rows)], [OUTPUTS])
    assert (found - wanted).square().mean().sqrt() < 4e-5 * wanted.square().mean().sqrt()


@pytest.mark.parametrize("kind", HALVES)
def test_states_of_8_bits(kind: str, library: str) -> None:
    """Rounding to 127 steps costs half a per cent of normally distributed states; a comparison can ask for 16 bits."""
    rows, states = plain_rows(kind), states_of(5)
    wide, packed = packed_of(kind, rows), narrowed(packed_of(kind, rows))
    assert is_narrow(packed)
    assert not is_narrow(wide)
    found, wanted = (products.linear(states, [matrix], [OUTPUTS]) for matrix in (packed, wide))
    error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error == 0 if library == "torch" else 1e-3 < error < 8e-3
    with products.wide_states():
        assert torch.equal(products.linear(states, [packed], [OUTPUTS]), wanted)
    assert torch.equal(products.linear(states, [packed], [OUTPUTS]), found)
    (part,), (same,) = unpack(packed, INPUTS), unpack(wide, INPUTS)
    assert torch.equal(numbers(part), numbers(same))
    both = products.linear(states, [packed, wide, packed], [OUTPUTS] * 3)
    assert torch.equal(both, torch.cat([found, wanted, found], -1))


def test_another_thread_keeps_its_states_of_8_bits() -> None:
    if products.library() is None:
        pytest.skip("no C++ compiler")
    packed, states = narrowed(packed_of("Q4_K", plain_rows("Q4_K"))), states_of(3)
    alone = products.linear(states, [packed], [OUTPUTS])
    with products.wide_states(), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(products.linear, states, [packed], [OUTPUTS]).result(), alone)
        assert not torch.equal(products.linear(states, [packed], [OUTPUTS]), alone)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("kind", HALVES)
def test_a_state_has_the_same_bits_among_any_others(kind: str, bits: int) -> None:
    if products.library() is None:
        pytest.skip("no C++ compiler")
    packed, states = packed_of(kind, plain_rows(kind)), states_of(110)
    if bits == 8:
        narrow(packed)
    whole = products.linear(states, [packed], [OUTPUTS])
    for count in (*range(1, 14), 31, 97):
        for first in (0, 7):
            part = states[first : first + count]
            assert torch.equal(products.linear(part, [packed], [OUTPUTS]), whole[first : first + count])


@pytest.mark.parametrize("name", SPANS)
def test_spans_of_float32_scales(name: str, library: str) -> None:
    given, states = spanned(name), states_of(20)
    packed = pack([part_of(given, slice(0, 64)), part_of(given, slice(64, OUTPUTS))], OUTPUTS, INPUTS)
    (found,) = unpack(packed, INPUTS)
    for part, wanted in zip(found, given, strict=True):
        assert torch.equal(part, wanted) if isinstance(wanted, Tensor) else part == wanted
    weight = numbers(given)
    assert torch.equal(products.rows_of(torch.arange(OUTPUTS), packed, INPUTS), weight)
    wanted = states.double() @ weight.double().T
    for matrix, most in ((packed, 4e-5), (narrowed(packed), 8e-3)):
        whole = products.linear(states, [matrix], [OUTPUTS])
        assert (whole - wanted).square().mean().sqrt() < most * wanted.square().mean().sqrt()
        if library == "compiled":  # in registers as in tiles
            assert all(torch.equal(products.linear(states[:n], [matrix], [OUTPUTS]), whole[:n]) for n in range(1, 20))


def part_of(given: Quantised, rows: slice) -> Quantised:
    return Quantised(*(each[rows] if isinstance(each, Tensor) else each for each in given))  # type: ignore[arg-type]


def test_matrices_side_by_side(library: str) -> None:
    """Of different kinds, and with last blocks that are not full."""
    outputs, states = [64, 77, 3], states_of(3)
    pairs = zip(["Q4_K", "Q6_K", "Q8_0"], outputs, strict=True)
    matrices = [packed_of(kind, plain_rows(kind, count)) for kind, count in pairs]
    alone = [products.linear(states, [matrix], [count]) for matrix, count in zip(matrices, outputs, strict=True)]
    assert torch.equal(products.linear(states, matrices, outputs), torch.cat(alone, -1))


def test_a_state_that_is_no_number_gives_none(library: str) -> None:
    states = states_of(3)
    states[1, 40], states[2, 700] = torch.nan, torch.inf
    for packed in (packed_of("Q4_K", plain_rows("Q4_K")), narrowed(packed_of("Q4_K", plain_rows("Q4_K")))):
        found = products.linear(states, [packed], [OUTPUTS])
        assert found[0].isfinite().all()
        assert not found[1:].isfinite().any()
        assert products.linear(torch.zeros(1, INPUTS), [packed], [OUTPUTS]).abs().max() == 0


@pytest.mark.parametrize("instructions", OTHERS.values(), ids=OTHERS)
def test_other_instructions_give_the_same_bits(instructions: list[str], tmp_path: Path, monkeypatch) -> None:
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512") or products.library() is None:
        pytest.skip("this processor has no other instructions to compare with")
    if "-mavx512vnni" in instructions and not torch.cpu.get_capabilities()["avx512_vnni"]:
        pytest.skip("this processor lacks what is multiplied beside tiles")
    matrices, states = [packed_of(kind, plain_rows(kind)) for kind in HALVES], states_of(21)
    matrices += [pack([spanned(name)], OUTPUTS, INPUTS) for name in SPANS]
    matrices = [*matrices, *map(narrowed, matrices)]
    outputs = [OUTPUTS] * len(matrices)
    wanted = products.linear(states, matrices, outputs)
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    options = [option for option in native.OPTIONS if option not in ("-O3", "-march=native")]
    monkeypatch.setattr(native, "OPTIONS", ("-O0", *options, *instructions))  # the order of sums is the source's
    products.library.cache_clear()
    try:
        assert torch.equal(products.linear(states, matrices, outputs), wanted)
        ids = torch.arange(OUTPUTS)
        for kind, matrix in zip(HALVES, matrices, strict=False):
            assert torch.equal(products.rows_of(ids, matrix, INPUTS), numbers(quantised(kind, plain_rows(kind))))
    finally:
        products.library.cache_clear()


@pytest.mark.parametrize("options", [["-march=armv8.2-a+dotprod"], ["-march=armv8-a"]], ids=["dotprod", "NEON"])
def test_products_compile_for_arm(options: list[str], tmp_path: Path) -> None:
    if (program := shutil.which("aarch64-linux-gnu-g++")) is None:
        pytest.skip("no cross compiler: apt-get install g++-aarch64-linux-gnu")
    others = [option for option in native.OPTIONS if option not in ("-march=native", "-O3")]
    arguments = [*others, "-O1", *options, str(products.SOURCE), "-o", str(tmp_path / "products.so")]
    subprocess.run([program, *arguments], check=True, capture_output=True)
    assert (tmp_path / "products.so").read_bytes()[18:20] == b"\xb7\0"  # the machine that it is for, AArch64


def test_modules_compute_what_dense_ones_do(library: str) -> None:
    rows, states = plain_rows("Q4_K"), states_of(4).view(2, 2, INPUTS)
    weight = numbers(quantised("Q4_K", rows))
    linear, embedding = PackedLinear(INPUTS, OUTPUTS, bias=True), PackedEmbedding(OUTPUTS, INPUTS)
    linear.packed = embedding.packed = packed_of("Q4_K", rows)
    assert linear.bias is not None
    nn.init.normal_(linear.bias)
    wanted = nn.functional.linear(states, weight, linear.bias)
    assert (linear(states) - wanted).abs().max() < 2e-4 * wanted.abs().max()
    assert linear(states.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(embedding(torch.tensor([[3, 76]])), weight[torch.tensor([[3, 76]])])


def test_parts_that_do_not_fit_are_refused() -> None:
    rows = plain_rows("Q4_0")
    with pytest.raises(ValueError, match="3 blocks of 32 outputs were given, and 128 outputs are 4"):
        pack([quantised("Q4_0", rows)], 128, INPUTS)
    with pytest.raises(ValueError, match="rows of 768 inputs were given, and the matrix has 512"):
        pack([quantised("Q4_0", rows)], OUTPUTS, 512)
    with pytest.raises(ValueError, match="groups of 16 inputs were given, and those have factors"):
        pack([quantised("Q4_0", rows)._replace(group=16)], OUTPUTS, INPUTS)
    parts: list[Quantised] = [quantised("Q4_0", rows[:64]), quantised("Q8_0", plain_rows("Q8_0")[64:])]
    with pytest.raises(ValueError, match="of several kinds"):
        pack(parts, OUTPUTS, INPUTS)


def test_without_a_compiler_there_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(1, "g++")

    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    for name, value in {"compiler": lambda: None, "_compile": failing}.items():
        products.library.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(native, name, value)
            assert products.library() is None
    products.library.cache_clear()
