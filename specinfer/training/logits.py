"""From a model's last hidden states to its logits, as its own ``forward`` makes them.

Knows: that a causal LM calls a base model, then an output matrix, and may then change the logits: cap them (Gemma 2),
scale them (Granite, Cohere), add a bias.  Does not know: what the logits are for.

The model is not changed, and none of its layers is written anew.  Its class's ``forward`` runs on a stand-in for the
model: the stand-in's base model returns given states, and its output matrix has only the wanted rows.
"""

from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from specinfer.attention import TreeModel, running
from specinfer.errors import UnsupportedModel

CHECKED_TOKENS = 4  # of the pass that a target is checked with
TOLERANCE = 1e-2  # largest error there, as a share of the logits' standard deviation


class TargetLogits:
    """A model's logits of given states.

    Args:
        model: a ``transformers`` causal LM.
        token_ids: (V',) the tokens whose logits are wanted; None = all.
    """

    def __init__(self, model: PreTrainedModel, token_ids: Tensor | None = None) -> None:
        self.model, self.output = model, model.get_output_embeddings()
        if token_ids is not None:
            self.output = _OutputRows(self.output, token_ids)

    def __call__(self, states: Tensor) -> Tensor:
        """Return logits (N, V') of final hidden states (N, H)."""
        base_model = _FixedBaseModel((states.to(self.output.weight.dtype)[None],))
        model = _StandIn(self.model, base_model, self.output)
        input_ids = torch.zeros(1, len(states), dtype=torch.long, device=states.device)  # not read
        return type(self.model).forward(model, input_ids).logits[0]


def check_logits(model: PreTrainedModel) -> None:
    """Refuse a model whose logits do not follow from its last hidden states in this way, by one small pass.

    Raises:
        UnsupportedModel: drafts would learn from logits that are not the target's.
    """
    ids = torch.arange(1, CHECKED_TOKENS + 1, device=model.device)
    with running(TreeModel(model)):
        output = model(ids[None], output_hidden_states=True, use_cache=False)
        logits, states = output.logits[0].float(), output.hidden_states[-1][0]
        try:
            errors = TargetLogits(model)(states) - logits, TargetLogits(model, ids)(states) - logits[:, ids]
            error = max(difference.abs().max().item() for difference in errors)
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as caught:
            reason = f"{type(model).__name__} does not say how: {' '.join(str(caught).split()):.120}"
        else:
            if error <= TOLERANCE * logits.std().item():
                return
            reason = f"largest error {error:.1e}"
    raise UnsupportedModel(
        f"{type(model).__name__}: its logits cannot be worked out from its last hidden states ({reason}), and drafts "
        "learn from those: choose another target"
    )


class _OutputRows:
    """Some rows of an output matrix, with their biases."""

    def __init__(self, output: nn.Module, token_ids: Tensor) -> None:
        self.weight = output.get_parameter("weight").detach()[token_ids]
        bias = getattr(output, "bias", None)
        self.bias = None if bias is None else bias.detach()[token_ids]

    def __call__(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.weight, self.bias)


class _FixedBaseModel(tuple[Tensor]):
    """Stands in for a base model, for the decoder in it, and for what they return: the last hidden states (1, N, H).

    All other names, ``cache`` for example, are None.
    """

    last_hidden_state = property(itemgetter(0))
    decoder = property(lambda self: self)

    def __call__(self, *_: object, **__: object) -> "_FixedBaseModel":
        return self

    def __getattr__(self, name: str) -> None:
        return None


class _StandIn:
    """Stands in for a causal LM: its attributes, but another base model and output matrix."""

    def __init__(self, model: PreTrainedModel, base_model: _FixedBaseModel, output: object) -> None:
        self._model = model
        self._replaced = {id(model.base_model): base_model, id(model.get_output_embeddings()): output}

    def __getattr__(self, name: str) -> object:
        value = getattr(self._model, name)
        return self._replaced.get(id(value), value)
