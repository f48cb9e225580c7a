"""How much memory is free.  Knows: the system.  Does not know: what takes memory."""

from math import inf
from pathlib import Path

import torch


def free_bytes(device: torch.device = torch.device("cpu")) -> float:  # noqa: B008
    """Return the memory of a device that is available, without swapping, infinite if the system does not say."""
    if device.type == "cuda":  # what torch holds and nobody uses is available, too
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + held)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return inf
