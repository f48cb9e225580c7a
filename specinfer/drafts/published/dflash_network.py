"""The network of block heads (DFlash, arXiv 2602.06036): a few layers that fill a block of masked slots in one pass.

Knows: its layers, what slots read, which of them predict.  Does not know: drafting, how caches work, files.

The slots of a block hold the root and mask tokens.  The target's states of earlier tokens are fused to one each; all
layers take keys and values of it as it is, and only of the slots what their layers made of them.  So a token of the
context costs two matrices a layer, once.  Slots see the whole context and each other, or with causal slots (JetSpec,
arXiv 2606.18394) only the slots before them.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig

from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.layers import Layer, Reading, norm
from specinfer.drafts.published.network import DraftNetwork, Mask
from specinfer.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers, as transformers names them


class BlockLayer(Layer):
    """A layer of slots, which attend to context and slots."""

    def forward(self, hidden: Tensor, reading: Reading, context: Tensor) -> Tensor:
        """Return the slots' next states, (B, slots, H).

        Args:
            hidden: (B, slots, H).
            reading: its mask (B, 1, slots, L), cosines and sines (B, slots + C, D), earlier context.
            context: (B, C, H) the fused states of new tokens of the context, which no layer changes.
        """
        return self.added(hidden, self.attend(self.input_layernorm(hidden), context, reading))

    def attend(self, normed: Tensor, context: Tensor, reading: Reading) -> Tensor:
        """Return the attention of slots to the context and to each other."""
        return self.self_attn(normed, torch.cat((normed, context), 1), reading)


class DFlashNetwork(DraftNetwork):
    """The network of a DFlash or JetSpec head.

    Attributes:
        from_anchor: whether slot i predicts the token after its position, so that the root's slot also predicts;
            else slot i predicts the token at its position.
        draft_layers: hidden states that its session needs: 0, the last, for heads that read the slots' states.
        layer_type: of the layers.
        width: candidates of a depth whose pairs with the depth above it scores; then it has `pairs`.
        path_size: width of a state that it carries along a path, 0 = none; else it has `follow`.

    Args:
        config: of `network_config`, with `Attention`'s fields, ``layer_types``, ``sliding_window`` and

            block_size, mask_token_id       slots of a block, and the token in all but the first
            target_layer_ids, layer_offset  of the target's layers that it reads; id i is its hidden_states[i + offset]
            target_size                     of these states
            from_anchor, measured_anchor    see above; whether it is a guess
            causal_types                    types of layers whose slots see no later ones
            input_scale, output_scale       of embeddings, of logits
            softcap                         of scaled logits, or 0

        token_ids, embeds, outputs: as in `DraftNetwork`.
    """

    draft_layers: tuple[int, ...] = ()
    layer_type: type[BlockLayer] = BlockLayer
    width: int | None = None
    path_size = 0
    never_compiled = "block heads run as they are"  # why, for `attention.packages`

    def build(self, config: LlamaConfig) -> None:
        """Add the layers."""
        self.from_anchor: bool = config.from_anchor
        self.target_size: int = config.target_size
        size, states = config.hidden_size, len(config.target_layer_ids)
        self.fc = nn.Linear(states * self.target_size, size, bias=False)  # the target's states -> one
        self.hidden_norm = norm(config)
        self.layers = nn.ModuleList(self.layer_type(config, i) for i in range(config.num_hidden_layers))
        self.norm = norm(config)

    @property
    def depth(self) -> int:
        """How many depths a block predicts."""
        return self.config.block_size - (not self.from_anchor)

    def conventions(self, layers: int) -> Sequence[Convention]:
        """Return the readings that a target of this depth allows, first the one that the format prescribes."""
        first = self.config.layer_offset
        found = [tuple(i + offset for i in self.config.target_layer_ids) for offset in (first, 1 - first)]
        possible = [states for states in found if all(0 <= i <= layers for i in states)] or found[:1]
        if not self.config.measured_anchor:
            return [Convention(states) for states in possible]
        anchors = self.config.from_anchor, not self.config.from_anchor
        return [Convention(states, (("from_anchor", anchor),)) for anchor in anchors for states in possible]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Mask = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        target_states: Tensor | None = None,
        block_states: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: object,
    ) -> SimpleNamespace:
        """Return ``logits`` (B, slots or kept, V') and ``hidden_states``, one (B, slots, H), of the slots.

        A pass without slots stores the context, and its logits are empty.

        Args:
            input_ids: (B, T) ids of the target: those of the slots, if there are any, then any, one for each token of
                the context.
            attention_mask: (B, 1, T, L), as the attention implementation takes it, or a dict of them by layer type.
            position_ids: (B, T).
            cache: keys and values of earlier context.
            target_states: (B, T, K, Ht) the target's states at the new tokens of the context, without slots; or else
            block_states: (B, T, K, Ht) the same behind a block; the states at its slots are not read.
            logits_to_keep: slots whose logits are wanted; 0 = all.
        """
        given = target_states if block_states is None else block_states
        if given is None:
            raise ModelError("a block head runs with the target's states of its context, and is never compiled")
        assert position_ids is not None
        slots = 0 if block_states is None else self.config.block_size
        context = self.hidden_norm(self.fc(given[:, slots:].to(self.dtype).flatten(2)))
        rotary = self.rotary(position_ids, context.dtype)
        if not slots:
            for layer in self.layers:
                attention: Any = layer.self_attn
                attention.stored(context, rotary, cache)
            return SimpleNamespace(logits=context[:, :0], hidden_states=(context[:, :0],))
        assert attention_mask is not None
        masks = self._masks(attention_mask, slots, position_ids)
        hidden = self.embed(input_ids[:, :slots]) * self.config.input_scale
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            hidden = layer(hidden, Reading(masks[kind], rotary, cache), context)
        hidden = self.norm(hidden)
        kept = hidden if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        return SimpleNamespace(logits=self.logits(kept), hidden_states=(hidden,))

    def logits(self, states: Tensor) -> Tensor:
        """Return logits (..., V') over the network's vocabulary of its final states (..., H)."""
        logits, softcap = super().logits(states), self.config.softcap
        logits = logits if self.config.output_scale == 1 else logits * self.config.output_scale
        return torch.tanh(logits / softcap) * softcap if softcap else logits

    def _masks(self, given: Tensor | Mapping[str, Tensor], slots: int, position_ids: Tensor) -> dict[str, Tensor]:
        """Return the mask (B, 1, slots, L) of each type of layer; causal types hide later slots.

        The new columns of a row follow its committed ones, and the first of them has the smallest position.
        """
        by_type = given if isinstance(given, Mapping) else dict.fromkeys(self.config.layer_types, given)
        masks = {kind: by_type[kind][:, :, :slots] for kind in self.config.layer_types}
        if not self.config.causal_types:
            return masks
        columns = torch.arange(next(iter(masks.values())).shape[3], device=position_ids.device)
        columns = columns - position_ids.amin(1)[:, None]  # (B, L): the slots are 0 ... slots - 1
        later = (columns[:, None] > torch.arange(slots, device=columns.device)[:, None]) & (columns < slots)[:, None]
        for kind in self.config.causal_types:
            if kind in masks:
                masks[kind] = masks[kind].masked_fill(later[:, None], torch.finfo(masks[kind].dtype).min)
        return masks
