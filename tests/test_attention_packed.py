"""Packed linear layers: the same products, only while passes run, never stale."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from specinfer.attention.packed import PackedLinears, Shared, packed

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


def test_a_model_stays_packed_until_the_outermost_use_ends() -> None:
    model = layers()
    with using(model):
        with using(model):
            pass
        assert "forward" in model[0].__dict__
    assert "forward" not in model[0].__dict__


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


class Attention(nn.Module):
    """Three layers on the same states, under the names that models give them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(48, n, bias=bias) for n in (32, 16, 16))
        self.to(torch.bfloat16)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values."""
        return torch.cat([self.q_proj(states), self.k_proj(states), self.v_proj(states.clone())], -1)


@pytest.mark.parametrize("bias", [True, False])
def test_layers_that_share_their_input_are_one_product(bias: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Attention(bias), torch.randn(2, 5, 48)
    plain = outputs(model, inputs)
    with using(model):
        assert packed(model).groups == [[model.q_proj, model.k_proj, model.v_proj]]
        for _ in range(2):  # the last layer's input is another tensor, so it is multiplied for itself
            torch.testing.assert_close(outputs(model, inputs), plain, rtol=2e-2, atol=2e-2)


def test_a_shared_product_belongs_to_its_input_and_is_let_go() -> None:
    asked: list[torch.Tensor] = []
    weight, one, two = torch.randn(6, 8), *torch.randn(2, 3, 8)

    def multiply(states: torch.Tensor) -> torch.Tensor:
        asked.append(states)
        return states @ weight.T

    shared = Shared(multiply, [4, 2])
    first, second = shared.forwards
    torch.testing.assert_close(first(one), one @ weight[:4].T)  # a part of a product may be rounded otherwise
    torch.testing.assert_close(second(two), two @ weight[4:].T)
    torch.testing.assert_close(first(two), two @ weight[:4].T)
    assert [id(states) for states in asked] == [id(one), id(two)]
    assert (shared.states, shared.parts) == (None, {})


def test_layers_of_which_only_some_have_a_bias_stay_apart() -> None:
    model = Attention()
    model.k_proj.bias = None
    assert len(PackedLinears(model).groups) == 3
