"""What runs the passes of a model: the base class, and the ways that one model has.

Knows: what is asked of a pass.  Does not know: any way to run one, trees, what is done with logits.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch

from specinfer.attention.forward import Forward
from specinfer.attention.layout import Layout, PerNode

Result = tuple[PerNode, ...]  # logits (n, V) of each row's wanted nodes; hidden states (n, K, H) if K layers are wanted


class Pass(ABC):
    """One way to run passes over the nodes of a batch.

    Attributes:
        dtype: of masks, cache and results; None = the model's.
        packs: whether it takes the nodes of all rows as one row, so that rows of different sizes cost no padding.
        runs_modules: whether it runs the model's modules.
        aux_layers: the layers whose hidden states it can return; None = all.
        first: how many passes took longer so far than others of their shapes will.
    """

    dtype: torch.dtype | None = None
    packs: bool = False
    runs_modules: bool = True
    aux_layers: Collection[int] | None = None
    first: int = 0

    @abstractmethod
    def __call__(self, model: Forward, nodes: Layout, cache: Any, aux_layers: Sequence[int]) -> Result:
        """Feed nodes to a model as new pending slots of a cache."""

    @abstractmethod
    def cache(self, model: Forward, rows: int, capacity: int, max_capacity: int | None, fixed: bool) -> Any:
        """Return an empty cache that these passes write: see `TreeCache`."""

    def width(self, size: int) -> int:
        """Return the nodes that rows of this size at most are padded to when they are laid out; 0 = none is."""
        return 0

    def refresh(self) -> str:
        """Return why it cannot stand for the model as it is now, or ""."""
        return ""

    def serving(self, network: torch.nn.Module) -> "Pass":
        """Return the same passes for another network of the same architecture."""
        return self

    def __str__(self) -> str:
        """Say how it runs, in a few words."""
        return "plain"


class Ways:
    """The ways in which one model's passes run: the usual one, and a faster one if there is any.

    Args:
        usual: runs any pass at any time.

    Attributes:
        fast: runs passes in its place while it stands for the model.
        missing: why there is no faster one.
        hindrance: why the faster one is not used now, as of the last `refresh`.
    """

    def __init__(self, usual: Pass) -> None:
        self.usual = usual
        self.fast: Pass | None = None
        self.missing = self.hindrance = ""

    def refresh(self, hindrance: str = "") -> None:
        """See whether the faster one still stands for the model, if nothing else hinders it."""
        self.hindrance = "" if self.fast is None else hindrance or self.fast.refresh()

    def serving(self, network: torch.nn.Module) -> "Ways":
        """Return the same ways for another network of the same architecture."""
        other = Ways(self.usual)
        other.missing, other.fast = self.missing, self.fast and self.fast.serving(network)
        other.refresh()
        return other

    def best(self, aux_layers: Collection[int] = ()) -> Pass:
        """Return what runs passes that return the hidden states of some layers."""
        fast = None if self.hindrance else self.fast
        can = fast and (fast.aux_layers is None or set(aux_layers) <= set(fast.aux_layers))
        return fast if fast and can else self.usual

    @property
    def reason(self) -> str:
        """Why passes run in the usual way, or ""."""
        return self.hindrance or (self.missing if self.fast is None else "")

    def __str__(self) -> str:
        """Say how passes run, and why they are not faster."""
        return f"{self.best()} ({self.reason})" if self.reason else str(self.best())
