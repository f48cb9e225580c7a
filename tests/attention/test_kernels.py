"""Kernels of compiled passes on a CPU: compiled alone, against torch in float64, and bit by bit against themselves."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specinfer.attention.compiler.kernels import FOLDER
from specinfer.attention.compiler.linear import pack
from specinfer.attention.compiler.packages import missing_compiler

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason="no C++ compiler, so no compiled passes")
HARNESS = r"""
#include <cstdint>
struct Given { void* data; int64_t *sizes, *strides; };
using AtenTensorHandle = Given*;
using AOTITorchError = int;
inline int aoti_torch_get_data_ptr(Given* given, void** data) { return *data = given->data, 0; }
inline int aoti_torch_get_sizes(Given* given, int64_t** sizes) { return *sizes = given->sizes, 0; }
inline int aoti_torch_get_strides(Given* given, int64_t** strides) { return *strides = given->strides, 0; }
#include "attend.h"
#include "linear.h"
extern "C" int attend(Given* results, Given* queries, Given* keys, Given* values, Given* mask, double scale) {
    return aoti_torch_specinfer_attend(results, queries, keys, values, mask, scale);
}
extern "C" int attend_packed(
    Given* results, Given* queries, Given* keys, Given* values, Given* mask, Given* rows, double scale) {
    return aoti_torch_specinfer_attend_packed(results, queries, keys, values, mask, rows, scale);
}
extern "C" int bf16(Given* a, Given* b, Given* c) { return aoti_torch_specinfer_linear_bf16(a, b, c); }
extern "C" int dynamic_int8(Given* a, Given* b, Given* c) { return aoti_torch_specinfer_linear_dynamic_int8(a, b, c); }
extern "C" int bf16_states(Given* a, Given* b, Given* c) { return aoti_torch_specinfer_linear_bf16_states(a, b, c); }
"""
HIDDEN = torch.finfo(torch.float32).min
NARROW = ["-mavx2", "-mfma"]
MACHINES = {"native": ["-march=native"], "narrow": NARROW, "no shuffles": [*NARROW, "-DSPECINFER_OLD_COMPILER"]}


class Given(ctypes.Structure):
    """A tensor, as the harness takes it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        """Return a pointer to a tensor, which must live as long."""
        sizes, strides = ((ctypes.c_int64 * tensor.ndim)(*each) for each in (tensor.shape, tensor.stride()))
        return ctypes.byref(cls(tensor.data_ptr(), sizes, strides))


@pytest.fixture(scope="module", params=MACHINES)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernels as a library: for this processor, for one with narrower registers, and by an old compiler's way."""
    if request.param != "native" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("no x86 processor with AVX2")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "harness.cpp").write_text(HARNESS)
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")))))
    options = ["-O1", "-std=c++20", "-fopenmp", "-shared", "-fPIC", *MACHINES[request.param], f"-I{FOLDER}"]
    subprocess.run([compiler, *options, "harness.cpp", "-o", "harness.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "harness.so"))


def attended(kernels: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return attention (B, H, T, V) by our kernel, whose results lie in memory as models read them."""
    rows, heads, nodes, size = queries.shape
    results = torch.full((rows, nodes, heads, values.shape[3]), torch.nan).transpose(1, 2)
    given = [Given.of(each) for each in (results, queries, keys, values, mask)]
    kernels.attend(*given, ctypes.c_double(size**-0.5))
    return results


def packed(kernels: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, real: Tensor) -> Tensor:
    """Return attention of the real ones of (B, T) nodes, side by side, (H, N, V)."""
    queries, mask = queries.transpose(1, 2)[real].transpose(0, 1)[None], mask[:, 0][real][None, None].contiguous()
    rows = torch.arange(len(real))[:, None].expand(real.shape)[real][None]
    results = torch.full((1, queries.shape[2], queries.shape[1], values.shape[3]), torch.nan).transpose(1, 2)
    given = [Given.of(each) for each in (results, queries, keys, values, mask, rows)]
    kernels.attend_packed(*given, ctypes.c_double(queries.shape[3] ** -0.5))
    return results[0]


def wanted(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return the same by torch, in float64."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(queries.double(), keys, values, mask.double())


def drawn(rows: int, heads: int, group: int, nodes: int, slots: int, size: int, width: int) -> tuple[Tensor, ...]:
    """Return queries, and keys and values in a cache with free slots, and a mask that hides a third of the slots."""
    torch.manual_seed(slots)
    queries = torch.randn(rows, nodes, heads * group, size).transpose(1, 2)
    keys, values = (torch.randn(rows, heads, slots + 9, each)[:, :, :slots] for each in (size, width))
    hidden = torch.rand(rows, 1, nodes, slots) < 0.3
    hidden[..., 0] = False
    return queries, keys, values, torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, HIDDEN)


@pytest.mark.parametrize("shape", [
    (1, 3, 3, 1, 150, 64, 64), (2, 2, 2, 3, 37, 8, 8), (3, 4, 1, 1, 17, 80, 72), (2, 1, 2, 33, 129, 20, 40),
    (1, 1, 3, 1, 1, 16, 16), (2, 2, 4, 7, 65, 128, 96), (1, 1, 1, 13, 16, 4, 1), (5, 1, 9, 2, 31, 32, 33),
])  # fmt: skip
def test_attention_is_that_of_torch(kernels: Any, shape: tuple[int, ...]) -> None:
    """Rows, heads of keys, queries of each, nodes, slots, and dimensions that fill registers or do not."""
    given = drawn(*shape)
    torch.testing.assert_close(attended(kernels, *given).double(), wanted(*given), rtol=1e-5, atol=2e-6)


def test_attention_spans_all_numbers(kernels: Any) -> None:
    """Scores far apart, slots that no node sees, a mask that is a bias, and one for all rows."""
    queries, keys, values, mask = drawn(2, 2, 3, 4, 90, 32, 32)
    mask[..., 16:64] = HIDDEN
    for scale in (1.0, 30.0, 1e4):
        torch.testing.assert_close(
            attended(kernels, scale * queries, keys, values, mask).double(),
            wanted(scale * queries, keys, values, mask),
            rtol=1e-3,
            atol=1e-4,
        )
    bias = torch.randn(1, 1, 4, 90).expand(2, -1, -1, -1)
    found = attended(kernels, queries, keys, values, bias)
    torch.testing.assert_close(found.double(), wanted(queries, keys, values, bias), rtol=1e-5, atol=2e-6)


def test_a_node_that_sees_nothing_gets_numbers(kernels: Any) -> None:
    """Padding: nobody reads them, but not-a-number would spread."""
    queries, keys, values, mask = drawn(1, 1, 2, 3, 40, 16, 16)
    seen = attended(kernels, queries, keys, values, mask)
    mask[:, :, 1] = HIDDEN
    found = attended(kernels, queries, keys, values, mask)
    assert found.isfinite().all()
    assert found[:, :, [0, 2]].equal(seen[:, :, [0, 2]])
    assert attended(kernels, queries, keys, values, torch.full_like(mask, HIDDEN)).isfinite().all()


@pytest.mark.parametrize("sizes", [(5,), (1, 1, 1), (3, 1, 20, 7), (20, 20)])
def test_packed_attention_is_that_of_rows(kernels: Any, sizes: tuple[int, ...]) -> None:
    """Nodes of rows of different sizes side by side get what they get in a batch with padding, bit by bit."""
    queries, keys, values, mask = drawn(len(sizes), 2, 3, max(sizes), 75, 24, 40)
    real = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    padded = attended(kernels, queries, keys, values, mask)
    assert packed(kernels, queries, keys, values, mask, real).equal(padded.transpose(1, 2)[real].transpose(0, 1))


@pytest.mark.parametrize(("size", "width"), [(24, 40), (64, 64)])
def test_attention_has_the_same_bits_in_every_pass(kernels: Any, size: int, width: int) -> None:
    """Alone, beside other nodes and rows, and with gaps between the slots that it sees."""
    queries, keys, values, mask = drawn(3, 2, 3, 15, 75, size, width)
    together = attended(kernels, queries, keys, values, mask)
    for row, node in product(range(3), range(15)):
        seen = (mask[row, 0, node] == 0).nonzero().flatten()
        alone = attended(
            kernels,
            queries[row : row + 1, :, node : node + 1].clone(),
            keys[row : row + 1, :, seen],
            values[row : row + 1, :, seen],
            torch.zeros(1, 1, 1, len(seen)),
        )
        assert alone.equal(together[row : row + 1, :, node : node + 1])


def test_a_short_row_beside_a_long_one_reads_its_own_slots(kernels: Any) -> None:
    """Behind them the cache holds what would spread: zero times not-a-number."""
    queries, keys, values, mask = drawn(2, 2, 3, 4, 150, 24, 40)
    alone = attended(kernels, queries, keys[:, :, :70], values[:, :, :70], mask[..., :70].clone())
    mask[0, ..., 70:] = HIDDEN
    for states in (keys, values):
        states[0, :, 80:] = torch.nan  # 70 to 79 may be read with the last ones
    together = attended(kernels, queries, keys, values, mask)
    assert together[0].equal(alone[0])
    assert together[1].isfinite().all()


def multiplied(function: Callable[..., int], states: Tensor, packed: Tensor, outputs: int) -> Tensor:
    results = torch.full((len(states), outputs), torch.nan)
    function(*map(Given.of, (results, states, packed)))
    return results


@pytest.mark.parametrize(("size", "outputs"), [(64, 32), (96, 7), (30, 100), (1536, 40)])
def test_products_are_those_of_float64_and_have_the_same_bits_for_any_number_of_states(
    kernels: Any, size: int, outputs: int
) -> None:
    torch.manual_seed(size)
    weight = torch.randn(outputs, size).bfloat16().float()
    packed = pack([weight], "bf16")
    states = torch.randn(130, size).bfloat16()
    exact = states.double() @ weight.double().T
    for function, given in ((kernels.bf16, states.float()), (kernels.bf16_states, states)):
        whole = multiplied(function, given, packed, outputs)
        torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-6 * size)
        for rows in (1, 2, 5, 11, 12, 13, 16, 17, 25, 32, 33, 49, 97):
            assert multiplied(function, given[:rows].clone(), packed, outputs).equal(whole[:rows])


def test_torch_finds_its_tiles_as_they_were(kernels: Any) -> None:
    """Where the processor has AMX, torch's products and ours take turns, and their tiles have other shapes."""
    torch.manual_seed(0)
    weight, states = torch.randn(96, 64).bfloat16(), torch.randn(24, 64).bfloat16()
    packed = pack([weight], "bf16")
    for rows in (3, 24, 17):
        theirs, own = torch.nn.functional.linear(states[:rows], weight), states[:rows].clone()
        found = multiplied(kernels.bf16_states, own, packed, 96)
        torch.testing.assert_close(found, theirs.float(), rtol=0.02, atol=0.05)
        assert torch.nn.functional.linear(states[:rows], weight).equal(theirs)
        assert multiplied(kernels.bf16_states, own, packed, 96).equal(found)


@pytest.mark.parametrize(("size", "outputs"), [(64, 32), (100, 7), (20, 100), (1536, 40)])
def test_products_in_8_bits_are_those_of_rounded_weights_and_states(kernels: Any, size: int, outputs: int) -> None:
    torch.manual_seed(size)
    weights = [torch.randn(outputs - 3, size), torch.zeros(1, size), 1e-3 * torch.randn(2, size)]
    states = torch.cat([torch.randn(40, size), torch.zeros(1, size), 1e3 * torch.randn(89, size)])
    whole = multiplied(kernels.dynamic_int8, states, pack(weights, "dynamic_int8"), outputs)
    numbers, of_outputs = in_8_bits(torch.cat(weights))
    rounded_states, of_states = in_8_bits(states)
    exact = (rounded_states @ numbers.T) * of_states * of_outputs.T
    torch.testing.assert_close(whole.double(), exact, rtol=1e-5, atol=1e-12)
    for rows in (1, 2, 5, 11, 12, 13, 25, 97):
        assert multiplied(kernels.dynamic_int8, states[:rows].clone(), pack(weights, "dynamic_int8"), outputs).equal(
            whole[:rows]
        )


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_state_that_is_no_number_has_no_products_in_8_bits(kernels: Any, number: float) -> None:
    states, packed = torch.randn(3, 20), pack([torch.randn(7, 20)], "dynamic_int8")
    states[1, 18] = number
    found = multiplied(kernels.dynamic_int8, states, packed, 7)
    assert found.isfinite().all(1).tolist() == [True, False, True]
    assert not found[1].isfinite().any()


def in_8_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers (n, K) and the scale of each row (n, 1), float64; their sums and products are exact."""
    largest = numbers.abs().amax(1, keepdim=True).clamp(min=1e-12)
    return (numbers * (127 / largest)).round().double(), (largest / 127).double()
