"""The ways in which passes may run, beside the usual one: whoever is asked first, and has one, runs them.

Knows: who offers faster passes.  Does not know: how any of them works.

A new way is a module of this folder, or what makes it ready, and a line here.
"""

from collections.abc import Callable, Sequence

from specinfer.attention.compiler import packages
from specinfer.attention.model import TreeModel
from specinfer.attention.passes.base import Pass
from specinfer.errors import NotCompiled

# model, hidden states that passes must return, whether passes are compiled ("auto": if they were), whether weights may
# be rounded -> passes; raises `NotCompiled`, with the reason
Offer = Callable[[TreeModel, Sequence[int], bool | str, bool], Pass]

OFFERS: list[Offer] = [packages.offer]


def equip(model: TreeModel, aux_layers: Sequence[int], mode: bool | str, rounded: bool = False) -> None:
    """Give a model the first faster way that there is, or else say in its ways why there is none.

    Args:
        model: runs as usual until it has a faster way.
        aux_layers, mode, rounded: as `packages.offer`.

    Raises:
        InputError: the mode is none.
    """
    reasons = []
    for offer in OFFERS:
        try:
            model.ways.fast = offer(model, aux_layers, mode, rounded)
            return
        except NotCompiled as error:
            reasons.append(str(error))
    model.ways.missing = "; ".join(reasons)
