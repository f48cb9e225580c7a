"""How much memory is free.  Knows: the system.  Does not know: what takes memory."""

from math import inf
from pathlib import Path


def free_bytes() -> float:
    """Return the memory available without swapping, infinite if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return inf
