"""Large pages: numbers, memory of their own, and nothing taken that is not used; what is given back."""

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specinfer.common import memory
from specinfer.common.memory import LINE, REGION, LargePages, give_back

TENSORS = [torch.arange(7, dtype=torch.uint8), torch.randn(3, 5), torch.randn(4, 6).bfloat16(), torch.ones(0)]


@pytest.mark.parametrize("large", [True, False])
def test_copies_are_equal_and_apart(large, monkeypatch):
    if not large:
        monkeypatch.setattr(memory, "HAS_LARGE_PAGES", False)
    pages = LargePages()
    copies = [pages.copy(tensor) for tensor in TENSORS]
    for tensor, copy in zip(TENSORS, copies, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage().nbytes() == tensor.nbytes  # it can be saved alone
    copies[0].fill_(9)
    assert all(map(torch.equal, copies[1:], TENSORS[1:]))


@pytest.mark.skipif(not memory.HAS_LARGE_PAGES, reason="the system has none")
def test_they_begin_at_lines_side_by_side_in_one_region():
    pages = LargePages()
    found = [pages.zeros(size) for size in (1, LINE + 1, 5, REGION, 3)]
    places = [tensor.data_ptr() for tensor in found]
    assert [place - places[0] for place in places[:3]] == [0, LINE, 3 * LINE]
    assert all(place % LINE == 0 for place in places)
    assert all(not tensor.any() for tensor in found)


def test_what_it_holds_outlives_it():
    copy = LargePages().copy(torch.arange(1000))
    assert torch.equal(copy, torch.arange(1000))


def test_a_librarys_own_layout_stays():
    tensor = torch.randn(4, 4).to_mkldnn()
    assert LargePages().copy(tensor) is tensor


def in_memory(path):
    """The size of what lies in memory of a file, in kB."""
    entries = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return sum(int(re.search(r"^Rss: +(\d+)", entry, re.MULTILINE)[1]) for entry in entries if str(path) in entry)


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such list")
def test_files_of_weights_are_given_back_unless_they_were_written(tmp_path):
    written, kept = (torch.arange(1 << 20) + number for number in range(2))
    save_file({"written": written, "kept": kept}, path := tmp_path / "weights.safetensors")
    with safe_open(path, "pt") as file:
        first, second = (file.get_tensor(name) for name in ("written", "kept"))
    assert torch.equal(first, written)
    assert torch.equal(second, kept)
    assert in_memory(path) >= 16 << 10
    give_back([torch.ones(3)])
    assert in_memory(path) >= 16 << 10
    give_back([second])
    assert in_memory(path) == 0
    assert torch.equal(second, kept)
    first[5] = -1
    give_back([first, second])
    assert first[5] == -1
    assert torch.equal(first[6:], written[6:])
    assert torch.equal(second, kept)
