"""The network of a feature head: small layers that read a target's hidden states and borrow its outer matrices.

Knows: its layers, what it borrows.  Does not know: drafting, caches' insides, files, how it is trained.

Layers are Llama's, weights' names included, so that a target's own can be what they start from.  They are written out
here because a head's pass is short: of the library's layer, most of the time goes to operations on a few numbers.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

ROPE_BASE = 10_000.0  # of the rotary embedding's wavelengths (arXiv 2104.09864, section 3.2.2)
Rotation = tuple[Tensor, Tensor]  # cosines and signed sines, (..., D) each


def head_config(**fields: Any) -> LlamaConfig:
    """Return a head's configuration from `HEAD_FIELDS`."""
    return LlamaConfig(**{**fields, "attn_implementation": "sdpa"})


class FeatureHead(nn.Module):
    """The trainable part, with the forward signature of a ``transformers`` causal LM, so that it runs behind a mask.

    Args:
        config: a Llama configuration of the layer's size (``hidden_size`` is the target's), with ``taps``, the hidden
            states it reads.
        token_ids: (V',) int64 ascending, the target's ids that the head may propose.
    """

    def __init__(self, config: LlamaConfig, token_ids: Tensor) -> None:
        super().__init__()
        self.config = config
        size, taps = config.hidden_size, len(config.taps)
        self.fuse = nn.Linear(taps * size, size, bias=False)  # the target's states -> one
        self.mix = nn.Linear(2 * size, size, bias=False)  # embedding and state -> the layer's input
        self.layers = nn.ModuleList(HeadLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(size, eps=config.rms_norm_eps)
        self.token_ids: Tensor
        self.register_buffer("token_ids", token_ids)
        self.embedding: Tensor | None = None  # (V, H), the target's
        self.output: nn.Linear | None = None  # rows of the target's, (V', H)
        self.rotations: Rotation | None = None  # of all positions

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the weights."""
        return self.mix.weight.dtype

    def bind(self, target: Any) -> "FeatureHead":
        """Borrow a target's embedding and output matrices; return self on the target's device."""
        self.to(target.device)
        self.embedding = target.get_input_embeddings().weight.detach()
        rows = target.get_output_embeddings().weight.detach()[self.token_ids].to(self.dtype)
        self.output = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        self.output.weight = nn.Parameter(rows, requires_grad=False)
        self.rotations = _rotations(self.config, rows.device, rows.dtype)
        return self

    def get_input_embeddings(self) -> Any:
        """Return what holds the borrowed embedding, as transformers' models do."""
        return SimpleNamespace(weight=self.embedding)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        target_states: Tensor | None = None,
        own_states: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> SimpleNamespace:
        """Return ``logits`` (B, T or kept, V') and ``hidden_states``, one (B, T, H), of what follows each token.

        Args:
            input_ids: (B, T) ids of the target.
            attention_mask: (B, 1, T, L), as the attention implementation takes it.
            position_ids: (B, T).
            past_key_values: keys and values of earlier passes (`HeadLayer`).
            target_states: (B, T, K, H) the target's states that chose the tokens; or else
            own_states: (B, T, H) the head's own states that did.
            logits_to_keep: columns whose logits are wanted; 0 = all.
        """
        assert self.embedding is not None, "bind the head to a target first"
        assert self.rotations is not None
        assert position_ids is not None
        embedded = functional.embedding(input_ids, self.embedding).to(self.dtype)
        if own_states is None:
            assert target_states is not None
            own_states = self.fuse(_normalised(target_states.to(self.dtype)).flatten(2))
        hidden = self.mix(torch.cat((_normalised(embedded), own_states), -1))
        rotation = self.rotations[0][position_ids], self.rotations[1][position_ids]
        for layer in self.layers:
            hidden = layer(hidden, attention_mask, rotation, past_key_values)
        hidden = self.norm(hidden)
        kept = hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.logits(kept), hidden_states=(hidden,))

    def logits(self, states: Tensor) -> Tensor:
        """Return logits (..., V') over the head's vocabulary of final states (..., H), its own or the target's."""
        assert self.output is not None, "bind the head to a target first"
        return self.output(states.to(self.output.weight.dtype))


class HeadLayer(nn.Module):
    """Grouped-query attention with rotary positions, then a gated MLP, each beside a residual.

    Args:
        config: its sizes.
        index: which layer of the cache it is.
    """

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.index, self.queries, self.dim = index, config.num_attention_heads, size // config.num_attention_heads
        shared = (config.num_key_value_heads or self.queries) * self.dim
        self.input_layernorm = Norm(size, eps=config.rms_norm_eps)
        self.self_attn = _linears(
            q_proj=(size, size), k_proj=(size, shared), v_proj=(size, shared), o_proj=(size, size)
        )
        self.post_attention_layernorm = Norm(size, eps=config.rms_norm_eps)
        self.mlp = _linears(gate_proj=(size, inner), up_proj=(size, inner), down_proj=(inner, size))

    def start_as_identity(self) -> None:
        """Make the layer return what it is given, until it is trained."""
        for output in (self.self_attn["o_proj"], self.mlp["down_proj"]):
            assert isinstance(output, nn.Linear)
            nn.init.zeros_(output.weight)

    def forward(self, hidden: Tensor, mask: Tensor | None, rotation: Rotation, cache: Any) -> Tensor:
        """Return the states (B, T, H) after the layer.

        Args:
            hidden: (B, T, H).
            mask: (B, 1, T, L) bool or additive.
            rotation: of the positions, (B, T, 1, D).
            cache: keys and values of earlier passes, with ``update``; None = these alone.
        """
        hidden = hidden + self._attention(self.input_layernorm(hidden), mask, rotation, cache)
        states, mlp = self.post_attention_layernorm(hidden), self.mlp
        return hidden + mlp["down_proj"](functional.silu(mlp["gate_proj"](states)) * mlp["up_proj"](states))

    def _attention(self, states: Tensor, mask: Tensor | None, rotation: Rotation, cache: Any) -> Tensor:
        weights = self.self_attn
        query, key, value = (weights[name](states) for name in ("q_proj", "k_proj", "v_proj"))
        both = _rotated(torch.cat((query, key), -1).unflatten(-1, (-1, self.dim)), rotation).transpose(1, 2)
        query, key = both[:, : self.queries], both[:, self.queries :]
        value = value.unflatten(-1, (-1, self.dim)).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        output: Tensor = weights["o_proj"](mixed.transpose(1, 2).flatten(2))
        return output


class Norm(nn.Module):
    """Root mean square normalisation with a gain per feature (arXiv 1910.07467).

    The library's own warns and slows down where states are less precise than the weight, as in mixed training.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, states: Tensor) -> Tensor:
        """Return states (..., H) with a root mean square of 1, times the gain."""
        return functional.rms_norm(states, self.weight.shape, self.weight.to(states.dtype), self.eps)


def _linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


def _rotations(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Rotation:
    """Return cosines and signed sines of all positions, (max_position_embeddings, 1, D)."""
    half = config.hidden_size // config.num_attention_heads // 2
    frequencies = ROPE_BASE ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(config.max_position_embeddings, device=device)[:, None, None] * frequencies
    sines = angles.sin()
    return torch.cat((angles, angles), -1).cos().to(dtype), torch.cat((-sines, sines), -1).to(dtype)


def _rotated(states: Tensor, rotation: Rotation) -> Tensor:
    """Return states (B, T, heads, D), of which the first half of D is paired with the second, turned by positions."""
    cosines, sines = (part.to(states.dtype) for part in rotation)
    swapped = states.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(states * cosines, swapped, sines)


def _normalised(states: Tensor) -> Tensor:
    """Return states with a root mean square of 1: layers differ a thousandfold in scale."""
    return functional.rms_norm(states, states.shape[-1:])
