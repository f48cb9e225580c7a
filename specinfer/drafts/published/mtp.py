"""Multi-token prediction: the layers that some released models come with, as a draft (DeepSeek-V3, arXiv 2412.19437).

Knows: what transformers' ``MtpModel`` holds, how its first layer drafts level by level.
Does not know: names of weights and families, which are transformers', how trees grow, verification.

The layer reads the pair of a state of the target, after its final norm, and the token that this state chose.  Below the
root it reads its own states, as an EAGLE head does (arXiv 2401.15077): one layer drafts all depths.
"""

from copy import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from specinfer.attention import TreeModel, device_of, resident
from specinfer.attention.forward import cache_name
from specinfer.attention.packed.modules import is_packed
from specinfer.drafts.language_model import HeadDraftSession
from specinfer.drafts.published.conventions import Convention
from specinfer.drafts.published.formats import PublishedDraft
from specinfer.drafts.published.network import AutoregressiveNetwork, Mask
from specinfer.engine.draft import Draft, DraftContext, DraftSession
from specinfer.errors import ModelError, UnsupportedModel, one_line


class MtpNetwork(AutoregressiveNetwork):
    """The first multi-token prediction layer of a target, behind the signature of a causal LM.

    Embedding, output matrix and rotary embedding are the target's own modules, which are only read; of the first two,
    copies if they are offloaded.

    Args:
        model: transformers' ``MtpModel`` of the target.
    """

    chains_normed = True  # whether a state below the root went through the layer's last norm

    def __init__(self, model: Any) -> None:
        super().__init__(model.config)
        self.model = model
        self.num_states, self.target_size = 1, model.config.hidden_size
        self.cache_name = cache_name(model.layers[0].mtp_block.forward)

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the layer."""
        return self.model.layers[0].eh_proj.weight.dtype

    def get_input_embeddings(self) -> object:
        """Return the target's embedding."""
        return self.model.embed_tokens

    def conventions(self, layers: int) -> list[Convention]:
        """Return the states that may be handed on: after the layer's last norm (transformers), or before it (vLLM)."""
        choices = (True, False) if self.model.use_post_norm else (True,)
        return [Convention((layers,), (("chains_normed", choice),)) for choice in choices]

    def bound(self, target: PreTrainedModel) -> Self:
        """Return a copy with options of its own; it shares all modules, which are this target's."""
        return copy(self)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the target's embeddings (..., H)."""
        return self.model.embed_tokens(ids)

    def next_states(self, states: Tensor, tokens: Tensor, mask: Mask, positions: Tensor, cache: Cache | None) -> Tensor:
        """Return the states that are handed on, (B, T, H)."""
        layer = self.model.layers[0]
        pair = layer.enorm(tokens), layer.hnorm(states)
        first_states = getattr(self.config, "mtp_hidden_states_first", False)
        hidden = layer.mtp_block(
            layer.eh_proj(torch.cat(pair[::-1] if first_states else pair, -1)),
            attention_mask=mask[self.config.layer_types[0]] if isinstance(mask, dict) else mask,
            position_embeddings=self._rotary(tokens, positions),
            position_ids=positions,
            **{self.cache_name: cache},
        )
        return self._normed(hidden) if self.chains_normed else hidden

    def logits(self, states: Tensor) -> Tensor:
        """Return logits (..., V) of states that are handed on (..., H), as the target does, with its scaling."""
        return self.model._project_to_logits(states if self.chains_normed else self._normed(states))

    def _rotary(self, embedded: Tensor, position_ids: Tensor) -> object:
        """Return the target's cosines and sines at positions; None if it has none."""
        if self.model.rotary_emb is None:
            return None
        by_layer = getattr(self.model, "has_per_layer_rope", False)  # which transformers 5.17 does not ask
        kind = {"layer_type": self.config.layer_types[0]} if by_layer else {}
        return self.model.rotary_emb(embedded, position_ids=position_ids, **kind)

    def _normed(self, hidden: Tensor) -> Tensor:
        """Return the states that the output matrix reads."""
        if self.model.use_shared_post_norm:
            return self.model.shared_post_norm(hidden)
        return self.model.layers[0].post_norm(hidden) if self.model.use_post_norm else hidden


class MtpDraft(Draft):
    """A target's own multi-token prediction layer as a draft: ``drafts=["mtp"]``.

    Args:
        convention: how it is read; None measures that when it is attached.
    """

    name = "mtp"

    def __init__(self, convention: Convention | None = None) -> None:
        self.convention = convention

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None = None) -> PublishedDraft:
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
        return PublishedDraft(self.name, network, HeadDraftSession, kept, self.convention).attach(target, tokenizer)

    def open(self, context: DraftContext) -> DraftSession:
        """Refuse: there is no draft without a target."""
        raise ModelError("draft mtp is a part of its target: give it to a decoder")


def load(target: PreTrainedModel) -> MtpNetwork:
    """Read the multi-token prediction layers of a loaded model from its checkpoint.

    Raises:
        ModelError: it has none that transformers knows, it is quantised, or the weights are not found or not whole.
    """
    config, name = target.config, target.config.name_or_path or type(target).__name__
    advice = "choose another draft"
    if not getattr(config.get_text_config(), "num_mtp_layers", None):
        family = config.model_type
        raise ModelError(f"{name} has no multi-token prediction layer that transformers knows ({family}): {advice}")
    if getattr(config, "quantization_config", None) or is_packed(target):
        raise ModelError(f"{name} is quantised, and transformers reads the layer only if the model is not: {advice}")
    try:
        from transformers.modeling_layers import MtpModel

        model = MtpModel.from_pretrained(target, device_map={"": device_of(target)})
    except Exception as error:  # a damaged file may raise anything
        raise ModelError(f"cannot load the multi-token prediction layer of {name}: {one_line(error)}") from error
    if config.dtype != target.dtype:  # the model was converted after it was loaded
        model.layers.to(target.dtype)
    model.embed_tokens, model.shared_head = resident(model.embed_tokens), resident(model.shared_head)
    return MtpNetwork(model)
