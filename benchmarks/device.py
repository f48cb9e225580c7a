"""What a GPU, its driver and torch cost without a model: the first steps of `gpu.py`, and the clocks of the others.

Where there is no GPU, figures that need one are None.

Knows: torch, clocks, the profiler, where a compiler finds what it needs.  Does not know: models, trees, answers' files.
"""

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from report import Case, Row
from torch.nn.functional import scaled_dot_product_attention

from specinfer.common.versions import versions

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NULL = "no CUDA device"
ROUNDS = 5  # of which the median counts
LIBRARIES = "/usr/local/cuda*/lib64/stubs", "/usr/local/nvidia/lib*", "/usr/lib/*-linux-gnu", "/usr/lib64"


# ---- clocks ----


def wait() -> None:
    """Wait for the GPU, if there is one."""
    if CUDA:
        torch.cuda.synchronize()


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds until something has returned, and until the device has done it."""
    wait()
    started = perf_counter()
    run()
    returned = perf_counter() - started
    wait()
    return returned, perf_counter() - started


def kernels(run: Callable[[], Any]) -> list[tuple[str, float]] | None:
    """Return names and milliseconds of the kernels and copies that something launches; None where none are seen."""
    activity = torch.profiler.ProfilerActivity.CUDA
    if not CUDA or activity not in torch.profiler.supported_activities():
        return None
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
        wait()
    return [
        (event.name, event.time_range.elapsed_us() / 1e3)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]


def bandwidth(size: int) -> float:
    """Return bytes a second, read and written, of a copy of `size` bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * size / min(timed(lambda: target.copy_(source))[1] for _ in range(ROUNDS))


# ---- facts ----


def facts(tiny: bool) -> Iterator[Case]:
    """Say what there is, and what the smallest things cost."""
    yield Case("versions", "facts", lambda: [installed()])
    yield Case("costs", "facts", lambda: [costs(1 << (20 if tiny else 32), 20 if tiny else 200)])


def installed() -> Row:
    """Return the device, versions, and where the programs and libraries are that compiling needs."""
    card = torch.cuda.get_device_properties(0) if CUDA else None
    paths = [*os.environ.get("LIBRARY_PATH", "").split(":"), *LIBRARIES]
    found = [file for path in paths if path for file in sorted(Path("/").glob(f"{path.strip('/')}/libcuda.so*"))]
    return {
        "device": card.name if card else "CPU",
        "gb": card.total_memory / 1e9 if card else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "g++": shutil.which("g++"),
        "nvcc": shutil.which("nvcc"),
        "libcuda": [str(file) for file in found],
    }


def costs(size: int, count: int) -> Row:
    """Return what the smallest things cost, in microseconds each, and the bandwidth of a copy of `size` bytes."""
    one, cell = torch.ones(1, device=DEVICE), torch.tensor([1])

    def each(run: Callable[[], Any], done: int = 1) -> float:
        def often() -> None:
            for _ in range(count):
                run()

        return 1e6 * median(timed(often)[done] for _ in range(ROUNDS)) / count

    return {
        "copy_gb_per_s": bandwidth(size) / 1e9,
        "launch_us": each(partial(one.add_, 1), done=0),
        "launch_done_us": each(partial(one.add_, 1)),
        "tiny_copy_to_device_us": each(partial(cell.to, DEVICE, non_blocking=True)),
        "item_us": each(one.item),
        "replay_of_100_us": each(_hundred(one)) if CUDA else None,
        "null": None if CUDA else NULL,
    }


def _hundred(cell: torch.Tensor) -> Callable[[], None]:
    """Return the replay of a graph of 100 kernels."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            cell.add_(1)
    return graph.replay


# ---- attention ----


def attention(tiny: bool) -> Iterator[Case]:
    """Measure attention as passes over trees call it: 16 nodes, a mask, another length in every step."""
    lengths = range(600, 641, 5)
    sizes = (2, 4, 16) if tiny else (32, 16, 128)
    yield Case("plans", "attention", lambda: [plans(sizes, lengths)])


def plans(sizes: tuple[int, int, int], lengths: Sequence[int]) -> Row:
    """Return milliseconds of the first and the second call with each length, but the first length, and the kernels.

    Args:
        sizes: heads, queries, and the size of a head.
        lengths: of keys and values.
    """
    heads, queries, size = sizes
    first, again, used = {}, {}, {}
    for length in lengths:
        query, key, value = (
            torch.randn(1, heads, rows, size, device=DEVICE, dtype=torch.bfloat16) for rows in (queries, length, length)
        )
        mask = torch.ones(1, 1, queries, length, dtype=torch.bool, device=DEVICE).tril(length - queries)
        run = partial(scaled_dot_product_attention, query, key, value, attn_mask=mask)
        first[length], again[length] = 1e3 * timed(run)[1], 1e3 * timed(run)[1]
        launched = kernels(run)
        used[length] = max(launched, key=lambda kernel: kernel[1])[0][:80] if launched else None
    counted = lengths[1:]  # the first call loads libraries
    return {
        "first_ms": median(first[length] for length in counted),
        "again_ms": median(again[length] for length in counted),
        "first_ms_by_length": first,
        "kernels": sorted({name for name in used.values() if name}) or None,
        "null": None if CUDA else NULL,
    }
