"""From a model's last hidden states to its logits, as its own forward makes them.

Knows: that a causal LM calls a base model, then an output matrix, and does what it likes with the result: caps it
(Gemma 2), scales it (Granite, Cohere), adds a bias.  Does not know: what the logits are for.

No layer is written anew and nothing is swapped in the model: its class's own ``forward`` runs on a view of the model
whose base model hands out the given states, and whose output matrix has the wanted rows only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.attention import TreeModel, running
from specinfer.errors import UnsupportedModel

TRIED = 4  # tokens of the pass that a target is checked with
CLOSE = 1e-2  # largest error there, as a share of the logits' spread


class TargetLogits:
    """A model's logits of given states.

    Args:
        model: a ``transformers`` causal LM.
        token_ids: (V',) the tokens whose logits are wanted; None = all.
    """

    def __init__(self, model: Any, token_ids: Tensor | None = None) -> None:
        self.model, self.output = model, model.get_output_embeddings()
        if token_ids is not None:
            self.output = _Rows(self.output, token_ids)

    def __call__(self, states: Tensor) -> Tensor:
        """Return logits (N, V') of final hidden states (N, H)."""
        view = _View(self.model, _Base(states.to(self.output.weight.dtype)[None]), self.output)
        nothing = torch.zeros(1, len(states), dtype=torch.long, device=states.device)
        logits: Tensor = type(self.model).forward(view, nothing).logits[0]
        return logits


def check_logits(model: Any) -> None:
    """Refuse a model whose logits do not follow from its last hidden states in this way, by one small pass.

    Raises:
        UnsupportedModel: drafts would learn from logits that are not the target's.
    """
    ids = torch.arange(1, TRIED + 1, device=model.device)
    with running(TreeModel(model)):
        passed = model(ids[None], output_hidden_states=True, use_cache=False)
        logits, states = passed.logits[0].float(), passed.hidden_states[-1][0]
        try:
            errors = [
                TargetLogits(model)(states).float() - logits,
                TargetLogits(model, ids)(states).float() - logits[:, ids],
            ]
            error = max(own.abs().max().item() for own in errors)
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as caught:
            reason = f"{type(model).__name__} does not say how: {' '.join(str(caught).split()):.120}"
        else:
            if error <= CLOSE * logits.std().item():
                return
            reason = f"largest error {error:.1e}"
    raise UnsupportedModel(
        f"{type(model).__name__}: its logits cannot be worked out from its last hidden states ({reason}), and drafts "
        "learn from those: choose another target"
    )


class _Rows:
    """Some rows of an output matrix, with their biases."""

    def __init__(self, output: Any, token_ids: Tensor) -> None:
        self.weight = output.weight.detach()[token_ids]
        bias = getattr(output, "bias", None)
        self.bias = None if bias is None else bias.detach()[token_ids]

    def __call__(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.weight, self.bias)


class _Base:
    """In the place of a base model, or of the decoder in it: hands out states (1, N, H)."""

    def __init__(self, states: Tensor) -> None:
        self.passed = _Passed(states)

    def __call__(self, *_: Any, **__: Any) -> "_Passed":
        return self.passed

    @property
    def decoder(self) -> "_Base":
        return self


class _Passed:
    """What a base model returns, under any name but the states' nothing."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


class _View:
    """A causal LM as its own ``forward`` sees it, but for its base model and its output matrix."""

    def __init__(self, model: Any, base: _Base, output: Any) -> None:
        self._parts = [(model.base_model, base), (model.get_output_embeddings(), output)]
        self._model = model

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._model, name)
        return next((other for part, other in self._parts if own is part), own)
