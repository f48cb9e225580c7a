"""Packed linear layers: the same products, only while passes run, never stale."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from specinfer.attention.packed import PackedLinears, packed

torch_packs = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
pytestmark = pytest.mark.skipif(not torch_packs, reason="oneDNN multiplies no bfloat16 on this CPU")


class Adapted(nn.Linear):
    """A layer that computes something else."""


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32, bias=False)).to(torch.bfloat16).eval()


@contextmanager
def using(model: nn.Module) -> Iterator[None]:
    packed(model).refresh()
    with packed(model):
        yield


@torch.inference_mode()
def outputs(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs.to(next(model.parameters()).dtype))


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_products_are_those_of_the_layers(rows: int) -> None:
    model, inputs = layers(), torch.randn(2, rows, 48)
    plain = outputs(model, inputs)
    with using(model):
        assert "forward" in model[0].__dict__
        torch.testing.assert_close(outputs(model, inputs), plain, rtol=2e-2, atol=2e-2)
    assert "forward" not in model[0].__dict__
    assert torch.equal(outputs(model, inputs), plain)


def test_weights_changed_in_place_are_packed_again() -> None:
    model, inputs = layers(), torch.randn(3, 48)
    with using(model):
        before = outputs(model, inputs)
    with torch.no_grad():
        model[2].weight.zero_()
    with using(model):
        assert outputs(model, inputs).abs().max() == 0
    assert before.abs().max() > 0


def test_a_model_cast_to_float32_is_left_alone() -> None:
    model = layers()
    with using(model):
        pass
    model.float()
    with using(model):
        assert "forward" not in model[0].__dict__


def test_one_copy_per_model() -> None:
    model = layers()
    assert packed(model) is packed(model)
    assert packed(model) is not packed(copy.deepcopy(model))


def test_only_plain_bfloat16_layers_are_packed() -> None:
    adapted = Adapted(8, 8).to(torch.bfloat16)
    wrapped = nn.Linear(8, 8).to(torch.bfloat16)
    wrapped.forward = lambda x: x  # type: ignore[method-assign]  # as a hooking library does
    model = nn.Sequential(adapted, wrapped, nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16))
    assert PackedLinears(model).layers == [model[3]]


def test_models_that_would_fill_the_machine_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.attention.packed._free_bytes", lambda: 1.0)
    assert PackedLinears(layers()).layers == []
