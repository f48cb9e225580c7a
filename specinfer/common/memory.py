"""Memory: how much is free, large pages of it, what is given back.

Knows: the system.  Does not know: what takes memory.
"""

import ctypes
import mmap
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

import torch
from torch import Tensor, nn

LARGE_PAGE = 1 << 21  # bytes
REGION = 1 << 26  # bytes that are asked for at a time, at least
LINE = 64  # bytes; tensors begin at a multiple
HAS_LARGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


def free_bytes(device: torch.device = torch.device("cpu")) -> float:  # noqa: B008
    """Return the memory of a device that is available, without swapping, infinite if the system does not say."""
    if device.type == "cuda":  # memory that torch holds and nobody uses is also available
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + held)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return inf


def give_back(tensors: Iterable[Tensor] = ()) -> None:
    """Let the system take back memory that was needed for a while.

    Freed memory goes, which glibc keeps otherwise, and so do files that tensors lie in, as those of safetensors do:
    the system reads their pages again, mostly from its cache of files, where somebody needs them.

    Args:
        tensors: that nobody writes meanwhile; subclasses may have no memory of their own, and stay.  So does a file of
            which one page in memory was written.
    """
    with suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        plain = (tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter))
        addresses = {tensor.data_ptr() for tensor in plain if tensor.device.type == "cpu"}
        for mapped in _unwritten_files() if addresses else ():
            if any(address in mapped for address in addresses):
                library.madvise(ctypes.c_void_p(mapped.start), ctypes.c_size_t(len(mapped)), mmap.MADV_DONTNEED)


def _unwritten_files() -> Iterator[range]:
    """Yield the addresses of each file that lies in memory, none of whose pages this process has written."""
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        addresses, _access, _offset, _device, inode, *_ = entry.split(maxsplit=5)
        if inode != "0" and re.search(r"^Anonymous: +0 kB", entry, re.MULTILINE):
            yield range(*(int(address, 16) for address in addresses.split("-")))


class LargePages:
    """Memory for data that is read whole again and again, side by side in large pages where the system has them.

    Every small page (4 kB) costs a processor a look-up of its address, and a virtual machine a long one: there two
    cores of a Xeon read packed weights at 27 GB/s from large pages and at 19 GB/s from small ones.
    """

    def __init__(self) -> None:
        self._region: mmap.mmap | None = None
        self._free = range(0)  # bytes of it

    def zeros(self, size: int) -> Tensor:
        """Return zeros, uint8, of a size in bytes."""
        if not HAS_LARGE_PAGES or not size:
            return torch.zeros(size, dtype=torch.uint8)
        if len(self._free) < size:
            self._region, self._free = _region(max(size, REGION))
        begin, self._free = self._free[0], self._free[-(-size // LINE) * LINE :]
        return torch.frombuffer(self._region, dtype=torch.uint8, count=size, offset=begin)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor on the CPU; the tensor itself if its layout is a library's own."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return tensor
        return self.zeros(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _region(size: int) -> tuple[mmap.mmap, range]:
    """Return memory, and the part of it that begins with a large page; it is taken as it is written."""
    pages = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    with suppress(OSError):  # a system that gives none
        pages.madvise(mmap.MADV_HUGEPAGE, begin, size)
    return pages, range(begin, begin + size)
