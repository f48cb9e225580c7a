"""Decoder layers of the Llama family in fewer operations, while the engine's passes run.

Knows: how such a layer computes, and when one is plain enough.  Does not know: packing, trees, caches' insides.

A pass over a few tokens of a small model spends much of its time on small operations (normalisation step by step,
products asked for one by one, keys repeated for grouped queries) and on getting from module to module.  Here a layer is
one function of some twenty operations.  It computes the same, but rounds in other places.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

RECORDERS = "transformers.utils.output_capturing"  # their hooks stay once hidden states were asked for
FAMILY = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer)

Product = Callable[[Tensor], Tensor]  # of one linear layer, or of several that share their input, side by side


class Repeated:
    """The newest pass's mask, repeated: the first layer that asks makes it for all; it is kept until the next pass."""

    def __init__(self) -> None:
        self.made: tuple[Tensor | None, Tensor | None] = None, None  # a mask, and what was made of it

    def __call__(self, mask: Tensor, times: int) -> Tensor:
        """Return a mask (B, 1, T, L) for so many blocks of T queries, (B, 1, times T, L)."""
        own, repeated = self.made
        if own is not mask or repeated is None:
            repeated = mask.repeat(1, 1, times, 1)
            self.made = mask, repeated
        return repeated


def streamlined(layer: Any, products: Mapping[nn.Module, Product], masks: Repeated) -> Callable[..., Tensor] | None:
    """Return what a decoder layer can run instead of its ``forward``; None if it is of another kind, or not plain.

    Args:
        layer: any module.
        products: by the first of the linear layers they stand for: queries, keys and values are one, gate and up, too.
        masks: shared by the layers of a model.
    """
    if type(layer) not in FAMILY or "forward" in layer.__dict__:
        return None
    if not all(_is_plain(module) for module in layer.modules() if module is not layer):  # its own hooks run anyway
        return None
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention, mlp, layer.input_layernorm, layer.post_attention_layernorm)
    own = [products.get(first) for first in (attention.q_proj, attention.o_proj, mlp.gate_proj, mlp.down_proj)]
    usual = all(type(part).__module__ == type(layer).__module__ for part in parts)
    usual &= attention.config._attn_implementation == "sdpa" and attention.config.hidden_act == "silu"
    return _Layer(layer, own, masks) if usual and None not in own else None


def _is_plain(module: nn.Module) -> bool:
    """Whether calling the module does nothing but what its class says; transformers' recorders of attentions sleep."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return "forward" not in module.__dict__ and all(getattr(hook, "__module__", None) == RECORDERS for hook in hooks)


class _Layer:
    """A decoder layer as one function."""

    def __init__(self, layer: Any, products: Sequence[Any], masks: Repeated) -> None:
        attention, self.masks = layer.self_attn, masks
        self.project, self.output, self.widen, self.narrow = products
        self.norms = [_Norm(norm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self.index, self.dim, self.scale = attention.layer_idx, attention.head_dim, attention.scaling
        self.queries = attention.q_proj.out_features // self.dim
        self.shared = attention.k_proj.out_features // self.dim  # heads of keys, and of values

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        """Return the states after the layer; arguments as transformers gives them."""
        assert position_embeddings is not None
        heads = self.project(self.norms[0](hidden_states)).unflatten(-1, (-1, self.dim))
        turned, value = heads.split((self.queries + self.shared, self.shared), 2)
        turned = _rotated(turned, *position_embeddings).transpose(1, 2)
        query, key = turned.split((self.queries, self.shared), 1)
        value = value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.index)
        causal = attention_mask is None and query.shape[2] > 1
        if attention_mask is not None:  # the queries that share a key are one product
            query = query.reshape(query.shape[0], self.shared, -1, self.dim)
            attention_mask = self.masks(attention_mask, self.queries // self.shared)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attention_mask, is_causal=causal, scale=self.scale, enable_gqa=True
        ).reshape(*hidden_states.shape[:1], self.queries, *hidden_states.shape[1:2], self.dim)
        hidden = hidden_states + self.output(mixed.transpose(1, 2).flatten(2))
        gate, up = self.widen(self.norms[1](hidden)).chunk(2, -1)
        return hidden + self.narrow(functional.silu(gate) * up)


class _Norm:
    """RMS norm as the layer norm of (x, -x), whose mean is 0: on CPUs three operations, where an RMS norm is eight."""

    def __init__(self, norm: Any) -> None:
        self.weight = torch.cat((norm.weight, norm.weight)).detach()
        self.epsilon = norm.variance_epsilon

    def __call__(self, states: Tensor) -> Tensor:
        """Return states (..., H), each divided by its root mean square, times the weight."""
        both = torch.cat((states, -states), -1)
        return functional.layer_norm(both, self.weight.shape, self.weight, None, self.epsilon)[..., : states.shape[-1]]


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return states (B, T, heads, D), the first half of D paired with the second, turned by angles (B, T, D)."""
    first, second = states.chunk(2, -1)
    swapped = torch.cat((-second, first), -1)
    return torch.addcmul(states * cosines[:, :, None], swapped, sines[:, :, None])
