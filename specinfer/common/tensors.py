"""Numbers as tensors, to a device and back, and sizes of passes.

Knows: devices, shapes.  Does not know: models, trees.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NARROWEST = 8  # the fewest tokens of a padded pass
FEWEST = 512  # the fewest slots that it attends to; masked slots cost little
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}  # whole numbers that hold those of a type


def on_device(values: object, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for the device; floats as float32, ints as int64.

    A tensor or an array keeps its type.
    """
    if isinstance(values, Tensor):
        tensor = values
    elif isinstance(values, np.ndarray):
        tensor = torch.from_numpy(values)
    else:  # without the defaults that a caller may have set for all of torch
        tensor = torch.tensor(values, device="cpu")
        tensor = torch.tensor(values, dtype=torch.float32, device="cpu") if tensor.is_floating_point() else tensor
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)  # `to` takes time even on a CPU


def fetched(*tensors: Tensor) -> list[Tensor]:
    """Bring tensors of truth values, int64, float32 or float64 to the host, in one transfer if any is on a device."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    if device is None:
        return [*tensors]
    whole = [tensor.view(BITS.get(tensor.dtype, tensor.dtype)) for tensor in tensors]
    packed = torch.cat([part.to(device, torch.int64).flatten() for part in whole]).cpu()
    parts = zip(packed.split([part.numel() for part in whole]), whole, tensors, strict=True)
    return [part.to(bits.dtype).view(tensor.dtype).view(tensor.shape) for part, bits, tensor in parts]


def concat(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return tensors one after the other: a single one itself, and None if all are None."""
    given = [part for part in parts if part is not None]
    return torch.cat(given) if len(given) > 1 else next(iter(given), None)


def size_bucket(size: int) -> int:
    """Return the smallest size allowed for passes that is at least this one; there are four in every octave."""
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step


def padded_width(tokens: int) -> int:
    """Return the number of tokens that a pass is padded to: a power of two; on a GPU all of them cost the same."""
    return max(NARROWEST, 1 << (tokens - 1).bit_length())


def padded_rows(rows: int) -> int:
    """Return the number of rows, a power of two, that a pass over these is made for."""
    return 1 << (rows - 1).bit_length()


def padded_kv_length(slots: int) -> int:
    """Return the number of slots, a power of two, that a pass attends to if it needs these."""
    return max(FEWEST, 1 << (slots - 1).bit_length())
