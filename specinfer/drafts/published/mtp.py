"""Multi-token prediction: the layers that some released models come with, as a draft (DeepSeek-V3, arXiv 2412.19437).

Knows: what transformers' ``MtpModel`` holds, how its first layer drafts level by level.
Does not know: names of weights and families, which are transformers', how trees grow, verification.

The layer reads the pair of a state of the target, after its final norm, and the token that this state chose.  Below the
root it reads its own states, as an EAGLE head does (arXiv 2401.15077): one layer drafts all depths.
"""

from collections.abc import Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor

from specinfer.attention import TreeModel, device_of, resident
from specinfer.drafts.language_model import HeadDraftSession
from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.formats import PublishedDraft
from specinfer.drafts.published.network import DraftNetwork
from specinfer.engine.draft import Draft, DraftContext, DraftSession
from specinfer.errors import ModelError, UnsupportedModel


class MtpNetwork(DraftNetwork):
    """The first multi-token prediction layer of a target, behind the signature of a causal LM.

    Embedding, output matrix and rotary embedding are the target's own modules, which are only read; of the first two,
    copies if they are offloaded.

    Args:
        model: transformers' ``MtpModel`` of the target.
    """

    skips_first = True  # no state chose a text's first token
    chains_normed = True  # whether a state below the root went through the layer's last norm

    def __init__(self, model: Any) -> None:
        super().__init__(model.config)
        self.model = model
        self.target_size: int = model.config.hidden_size
        self.vocab_size: int = model.config.vocab_size
        self.pass_inputs = {"target_states": (1, self.target_size)}, {"draft_states": (self.target_size,)}

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the layer."""
        return self.model.layers[0].eh_proj.weight.dtype

    def get_input_embeddings(self) -> Any:
        """Return the target's embedding."""
        return self.model.embed_tokens

    def conventions(self, layers: int) -> list[Convention]:
        """Return what state may be handed on: after the layer's last norm (transformers), or before it (vLLM)."""
        choices = (True, False) if self.model.use_post_norm else (True,)
        return [Convention((layers,), (("chains_normed", choice),)) for choice in choices]

    def bound(self, target: Any) -> Self:
        """Return a copy with options of its own; it shares all modules, which are this target's."""
        return copy(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        target_states: Tensor | None = None,
        draft_states: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> SimpleNamespace:
        """Return ``logits`` (B, T or kept, V) and ``hidden_states``, one (B, T, H), of what follows each token.

        Args:
            input_ids: (B, T) ids of the target.
            attention_mask: (B, 1, T, L) additive, or one for each type of layer.
            position_ids: (B, T).
            past_key_values: a cache of the layer's keys and values.
            target_states: (B, T, 1, H) the target's states that chose the tokens; or else
            draft_states: (B, T, H) the layer's own states that did.
            logits_to_keep: columns whose logits are wanted; 0 = all.
        """
        states = draft_states
        if states is None:
            assert target_states is not None
            states = target_states[:, :, 0]
        layer, embedded = self.model.layers[0], self.model.embed_tokens(input_ids)
        pair = layer.enorm(embedded), layer.hnorm(states.to(self.dtype))
        first_states = getattr(self.config, "mtp_hidden_states_first", False)
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[self.config.layer_types[0]]
        hidden = layer.mtp_block(
            layer.eh_proj(torch.cat(pair[::-1] if first_states else pair, -1)),
            attention_mask=attention_mask,
            position_embeddings=self._rotary(embedded, position_ids),
            position_ids=position_ids,
            past_key_values=past_key_values,
        )
        normed = self._normed(layer, hidden)
        kept = normed if isinstance(logits_to_keep, int) else normed[:, logits_to_keep]
        logits = self.model._project_to_logits(kept)  # as the target does, with its scaling
        return SimpleNamespace(logits=logits, hidden_states=(normed if self.chains_normed else hidden,))

    def _rotary(self, embedded: Tensor, position_ids: Tensor | None) -> Any:
        """Return the target's cosines and sines at positions; None if it has none."""
        if self.model.rotary_emb is None:
            return None
        by_layer = getattr(self.model, "has_per_layer_rope", False)  # which transformers 5.17 does not ask
        kind = {"layer_type": self.config.layer_types[0]} if by_layer else {}
        return self.model.rotary_emb(embedded, position_ids=position_ids, **kind)

    def _normed(self, layer: Any, hidden: Tensor) -> Tensor:
        """Return what the output matrix reads."""
        if self.model.use_shared_post_norm:
            return self.model.shared_post_norm(hidden)
        return layer.post_norm(hidden) if self.model.use_post_norm else hidden


class MtpDraft(Draft):
    """A target's own multi-token prediction layer as a draft: ``drafts=["mtp"]``.

    Args:
        convention: how it is read; None measures that when it is attached.
    """

    name = "mtp"

    def __init__(self, convention: Convention | None = None) -> None:
        self.convention = convention

    def attach(self, target: TreeModel, tokenizer: Any = None) -> PublishedDraft:
        """Load the layer from the target's checkpoint, and return the draft.

        Raises:
            ModelError: the target has none that transformers knows, or its weights cannot be read; or it does not fit.
            UnsupportedModel: the target is spread over processes.
        """
        if target.ranks.size > 1:
            problem = f"draft mtp shares modules with its target, which is spread over {target.ranks.size} processes"
            raise UnsupportedModel(f"{problem}, and that is not tested: use other drafts")
        network = load(target.model).eval().requires_grad_(False)
        kept = f"mtp {target.model.config.name_or_path}"
        return PublishedDraft(self.name, network, _session, kept, self.convention).attach(target, tokenizer)

    def open(self, context: DraftContext) -> DraftSession:
        """Refuse: there is no draft without a target."""
        raise ModelError("draft mtp is a part of its target: give it to a decoder")


def load(target: Any) -> MtpNetwork:
    """Read the multi-token prediction layers of a loaded model from its checkpoint.

    Raises:
        ModelError: it has none that transformers knows, it is quantised, or the weights are not found or not whole.
    """
    config, name = target.config, target.config.name_or_path or type(target).__name__
    advice = "choose another draft"
    if not getattr(config.get_text_config(), "num_mtp_layers", None):
        family = config.model_type
        raise ModelError(f"{name} has no multi-token prediction layer that transformers knows ({family}): {advice}")
    if getattr(config, "quantization_config", None):
        raise ModelError(f"{name} is quantised, and transformers reads such layers only if they are not: {advice}")
    try:
        from transformers.modeling_layers import MtpModel

        model = MtpModel.from_pretrained(target, device_map={"": device_of(target)})
    except Exception as error:  # a damaged file may raise anything
        reason = " ".join(str(error).split())[:240] or type(error).__name__
        raise ModelError(f"cannot load the multi-token prediction layer of {name}: {reason}") from error
    if config.dtype != target.dtype:  # the model was converted after it was loaded
        model.layers.to(target.dtype)
    model.embed_tokens, model.shared_head = resident(model.embed_tokens), resident(model.shared_head)
    return MtpNetwork(model)


def _session(model: TreeModel, aux_layers: Sequence[int], context: DraftContext) -> HeadDraftSession:
    return HeadDraftSession(model, aux_layers, 1.0, context)
