"""The workers that a thread computes with (OpenMP's).  Knows: GNU's library, which torch has on Linux.
Does not know: what is computed."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

SOFT = 1  # omp_pause_soft: everything that was set stays


def release_workers() -> None:
    """Let the workers of the calling thread end; they begin anew with what it computes next, in 0.1 ms.

    Each thread has workers of its own.  Where all together are more than processors, libgomp lets them sleep between
    any two loops instead of waiting awake, and a pass on a CPU takes three times as long: in a server's thread for
    example, if another thread has loaded the model.  So a thread that stops computing releases its own.
    """
    for pause in _pauses():
        pause(SOFT)


@cache
def _pauses() -> list[Callable[[int], object]]:
    """Return ``omp_pause_resource_all`` (OpenMP 5.0, 3.2.44) of each copy of the library in this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = sorted({line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line})
    found = [getattr(ctypes.CDLL(path), "omp_pause_resource_all", None) for path in paths]
    return [pause for pause in found if pause is not None]
