"""Autocast: passes in another precision than a model's weights, as the caller's context says.

Knows: torch's autocast of a device, as it is now and as it was.  Does not know: models, passes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    """Return the type that autocast computes in now, on a device, with weights of this type; None if it does not."""
    kind = device.type
    if dtype is torch.float64 or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None  # float64 is never cast
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a device computes in the types of weights."""
    kind = device.type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_on else nullcontext()


def autocast_as_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what restores autocast of a device as it is now: a run's steps compute alike, whoever asks for them."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def restored() -> AbstractContextManager[object]:
        if not enabled and not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, dtype, enabled)

    return restored
