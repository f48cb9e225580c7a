"""Layers of published draft networks: attention whose queries and keys come from different states, and its block.

Knows: widths, biases, norms.  Does not know: what the states are, checkpoint formats.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half


def network_config(**fields: object) -> LlamaConfig:
    """Return a network's configuration: a Llama's sizes, as transformers names them, and fields of its own."""
    return LlamaConfig.from_dict(fields, attn_implementation="sdpa")


class Reading(NamedTuple):
    """The mask and the positions of tokens."""

    mask: Tensor | None  # (B, 1, S, L) additive
    rotary: tuple[Tensor, Tensor]  # cosines and sines, (B, T, D)
    cache: Cache | None  # keys and values of earlier tokens


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, behind an additive mask.

    Args:
        config: sizes as a Llama's: ``num_attention_heads``, ``num_key_value_heads``, ``head_dim``, ``attention_bias``;
            ``qkv_bias``: with it the output has no bias; ``qk_norm``: queries and keys are normed per head, as Qwen3's.
        index: of the layer in the cache.
        width: of the states that it reads; the output has ``hidden_size``.
    """

    def __init__(self, config: LlamaConfig, index: int, width: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None  # transformers fills both in
        self.index, self.head_dim = index, config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        bias = bool(config.attention_bias)
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias and not config.qkv_bias)
        self.q_norm = norm(config, self.head_dim) if config.qk_norm else None
        self.k_norm = norm(config, self.head_dim) if config.qk_norm else None

    def forward(self, asking: Tensor, known: Tensor, reading: Reading) -> Tensor:
        """Return the states that each asking token reads, (B, S, H).

        Args:
            asking: (B, S, width) states that queries come from, of the first S tokens.
            known: (B, T, width) states that keys and values come from.
            reading: whose cache gets the new keys and values.
        """
        queries = _turned(self._heads(self.q_proj(asking), self.q_norm), reading.rotary)
        keys, values = self.stored(known, reading.rotary, reading.cache)
        grouped = queries.shape[1] != keys.shape[1]
        attend = functional.scaled_dot_product_attention
        read = attend(queries, keys, values, attn_mask=reading.mask, enable_gqa=grouped)
        return self.o_proj(read.transpose(1, 2).flatten(2))

    def stored(self, known: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None) -> tuple[Tensor, Tensor]:
        """Return keys and values of states (B, T, width), after those in the cache, which gets them."""
        keys, values = self._heads(self.k_proj(known), self.k_norm), self._heads(self.v_proj(known), None)
        keys = _turned(keys, rotary)
        return (keys, values) if cache is None else cache.update(keys, values, self.index)

    def _heads(self, states: Tensor, normed: nn.Module | None) -> Tensor:
        """Return states by head, (B, heads, T, D)."""
        heads = states.unflatten(2, (-1, self.head_dim))
        return (heads if normed is None else normed(heads)).transpose(1, 2)


def _turned(heads: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return heads (B, heads, S, D) turned by the first S of some positions' cosines and sines, (B, T, D)."""
    cosines, sines = (part[:, None, : heads.shape[2]] for part in rotary)
    return heads * cosines + rotate_half(heads) * sines


class Layer(nn.Module):
    """The parts of a Llama's decoder layer: attention and a gated MLP, each after a norm.

    Args:
        config: as `Attention`'s.
        index: of the layer in the cache.
        width: of the states that its attention reads; None = ``hidden_size``.
    """

    def __init__(self, config: LlamaConfig, index: int, width: int | None = None) -> None:
        super().__init__()
        self.input_layernorm: nn.Module = norm(config)
        self.self_attn = Attention(config, index, width or config.hidden_size)
        self.post_attention_layernorm = norm(config)
        self.mlp = LlamaMLP(config)

    def added(self, states: Tensor, attended: Tensor) -> Tensor:
        """Return states (B, T, H) after the layer, given what its attention read, (B, T, H)."""
        states = states + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class DecoderLayer(Layer):
    """A Llama's decoder layer."""

    def forward(self, states: Tensor, reading: Reading) -> Tensor:
        """Return states (B, T, H) after the layer; reading is `Attention`'s."""
        read = self.input_layernorm(states)
        return self.added(states, self.self_attn(read, read, reading))


def norm(config: LlamaConfig, width: int | None = None) -> LlamaRMSNorm:
    """Return a root-mean-square norm of the network's width, or another one."""
    return LlamaRMSNorm(width or config.hidden_size, eps=config.rms_norm_eps)
