"""A model as sessions see it: its forward and the ways in which its passes run; and models made ready for passes.

Knows: evaluation mode, which way of running passes is used now.  Does not know: rows, trees, drafting.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from specinfer.attention.forward import Forward
from specinfer.attention.passes.base import Ways
from specinfer.attention.passes.plain import PlainPass
from specinfer.attention.passes.stateful import StatefulPass
from specinfer.attention.session import TreeSession
from specinfer.attention.torch_private import modules_of


class TreeModel(Forward):
    """A causal language model that scores trees: see `Forward`.

    Attributes:
        ways: in which its passes run.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.ways = Ways(StatefulPass() if self.stateful else PlainPass())

    def session(
        self,
        rows: int,
        capacity: int,
        max_capacity: int | None = None,
        aux_layers: Sequence[int] = (),
        graphs: bool = False,
    ) -> TreeSession:
        """Open a batch of ``rows`` empty sequences with a cache of ``capacity`` slots each.

        Args:
            rows, capacity, max_capacity: as `TreeCache`.
            aux_layers: the hidden states to return on commit: 0 = embeddings, i = after layer i, as in transformers.
            graphs: replay passes over a few tokens as CUDA graphs.

        Raises:
            InputError: graphs of a model that keeps states.
        """
        run = self.ways.best(aux_layers)
        return TreeSession(self, run.cache(self, rows, capacity, max_capacity, graphs), aux_layers, run)


_training: weakref.WeakKeyDictionary[Any, tuple[int, list[Any]]] = weakref.WeakKeyDictionary()
_modes = Lock()


@contextmanager
def evaluating(*models: TreeModel) -> Iterator[None]:
    """Put models in evaluation mode.  When the last thread leaves, every submodule is as it was before."""
    with _modes:
        for model in models:
            users, changed = _training.get(model.model, (0, []))
            training = [module for module in model.modules if module.training]
            for module in training:
                module.training = False
            _training[model.model] = users + 1, [*changed, *training]
    try:
        yield
    finally:
        with _modes:
            for model in models:
                users, changed = _training.pop(model.model)
                if users > 1:
                    _training[model.model] = users - 1, changed
                else:
                    for module in changed:
                        module.training = True


@contextmanager
def running(*models: TreeModel) -> Iterator[None]:
    """Prepare models for passes: evaluation mode, and compiled passes only if they still are the model's.

    Changed weights are packed again.
    """
    for model in models:
        model.modules = modules_of(model.model)
    with resumed(*models):
        for model in models:
            model.ways.refresh("autocast is on" if model.autocast else "")
        yield


@contextmanager
def resumed(*models: TreeModel) -> Iterator[None]:
    """`running` for models that ran before in this call, without looking for changes of them."""
    with torch.inference_mode(), evaluating(*models):
        yield
