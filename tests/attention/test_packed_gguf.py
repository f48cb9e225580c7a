"""GGUF files of a few bytes: what is read from them, and every lie that a header may tell."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from gguf_files import Made, gguf, text

from specinfer.attention.packed.gguf import Gguf, open_gguf
from specinfer.errors import ModelError

FLOATS = Made(0, (2, 3), struct.pack("<6f", *range(6)))
BLOCKS = Made(8, (5, 64), bytes(range(170)) * 2)  # Q8_0: 5 rows of 2 blocks of 34 bytes
VALUES = {
    "general.architecture": "llama",
    "a.number": 7,
    "a.float": 0.5,
    "a.bool": True,
    "a.text": "naïve",
    "texts": ["one", "", "három"],
    "numbers": [1, 2, 3],
    "floats": [0.5, -1.5],
}


def opened(folder: Path, data: bytes, name: str = "model.gguf") -> Gguf:
    (folder / name).write_bytes(data)
    return open_gguf(folder / name)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors(tmp_path: Path, version: int) -> None:
    found = opened(tmp_path, gguf(VALUES, {"floats": FLOATS, "blocks": BLOCKS}, version))
    assert found.metadata == VALUES
    assert [(name, stored.kind, stored.shape) for name, stored in found.tensors.items()] == [
        ("floats", "F32", (2, 3)),
        ("blocks", "Q8_0", (5, 64)),
    ]
    assert found.tensors["floats"].rows.view(torch.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.tensors["blocks"].rows.shape == (5, 68)
    assert bytes(found.tensors["blocks"].rows.flatten().tolist()) == BLOCKS.data


def test_other_numbers(tmp_path: Path) -> None:
    """Of types that Python's do not stand for in `value`."""
    forms: dict[int, tuple[str, float]] = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -300), 5: ("i", -7)}
    forms |= {10: ("Q", 2**63), 11: ("q", -1), 12: ("d", 0.1)}
    packed = {f"key {kind}": struct.pack(f"<I{form}", kind, given) for kind, (form, given) in forms.items()}
    assert list(opened(tmp_path, gguf(packed)).metadata.values()) == [given for _, given in forms.values()]


def test_tensors_begin_where_the_alignment_says(tmp_path: Path) -> None:
    data = gguf({"general.alignment": 128}, {"small": Made(0, (1,), bytes(4)), "floats": FLOATS}, alignment=128)
    found = opened(tmp_path, data)
    assert found.tensors["floats"].rows.view(torch.float32).flatten().tolist() == list(range(6))


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    """A hole of 8 GB is opened at once; its bytes are read when they are asked for."""
    many = 2**31
    header = gguf({}, {"large": Made(0, (2, many // 2), b"")})
    path = tmp_path / "model.gguf"
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * many)
    rows = open_gguf(path).tensors["large"].rows
    assert rows.shape == (2, 2 * many)
    assert rows[1, -1] == 0


def test_pages_that_were_let_go_are_read_again(tmp_path: Path) -> None:
    found = opened(tmp_path, gguf({}, {"floats": FLOATS}))
    before = found.tensors["floats"].rows.clone()
    found.release()
    assert torch.equal(found.tensors["floats"].rows, before)


def long(name: str, count: int) -> bytes:
    """A file with a key whose array of texts says that it has so many."""
    return gguf({name: struct.pack("<IIQ", 9, 8, count)})


LIES = {
    "nothing": (b"", "empty"),
    "another kind of file": (b"PK\x03\x04" + bytes(100), "does not begin with GGUF"),
    "version 1": (gguf(version=1), "its version is 1; versions 2 and 3"),
    "big endian": (gguf(version=3 << 24), "its numbers are big endian"),
    "many tensors": (gguf(count=2**63), f"should hold {2**63} tensors, and has no room for them"),
    "many keys": (gguf(keys=2**40), f"should hold {2**40} keys, and has no room for them"),
    "a key too many": (gguf({"a": "text" * 20}, keys=2), "ends after .* within its header|twice|no room"),
    "a tensor too many": (gguf({}, {"a": FLOATS}, count=2), "dimensions|ends after|twice"),
    "a long text": (gguf({"key": struct.pack("<IQ", 8, 2**62)}), "ends after .* bytes, within its header"),
    "many texts": (long("key", 2**61), f"should hold {2**61} texts in 'key', and has no room for them"),
    "many numbers": (gguf({"key": struct.pack("<IIQ", 9, 6, 2**61)}), f"should hold {2**61} numbers in 'key'"),
    "a text that is none": (
        gguf({"key": struct.pack("<I", 8) + text(b"\xff\xfe")}),
        "a text of its header is not UTF-8",
    ),
    "an unknown type": (gguf({"key": struct.pack("<I", 13)}), "key 'key' has values of unknown type 13"),
    "arrays in an array": (gguf({"key": struct.pack("<IIQ", 9, 9, 1)}), "key 'key' has values of unknown type 9"),
    "a key twice": (gguf([("key", 1), ("key", 2)]), "key 'key' is there twice"),
    "a tensor twice": (gguf({}, [("a", FLOATS), ("a", FLOATS)]), "tensor 'a' is there twice"),
    "no dimensions": (gguf({}, {"a": Made(0, (), bytes(4))}), "tensor 'a' has 0 dimensions, and 1 to 4"),
    "many dimensions": (gguf({}, {"a": Made(0, (1,) * 5, bytes(4))}), "tensor 'a' has 5 dimensions, and 1 to 4"),
    "no weights": (gguf({}, {"a": Made(0, (4, 0), b"")}), r"tensor 'a' of F32 has shape \(4, 0\)"),
    "a part of a block": (gguf({}, {"a": Made(8, (1, 48), bytes(68))}), r"tensor 'a' of Q8_0 has shape \(1, 48\)"),
    "a format that is not read": (gguf({}, {"a": Made(17, (1, 256), bytes(74))}), "format IQ2_XS, .* such as Q4_K_M"),
    "a format that is none": (gguf({}, {"a": Made(77, (1, 256), bytes(74))}), "tensor 'a' has format number 77"),
    "a tensor beyond the end": (
        gguf({}, {"a": FLOATS._replace(offset=32)}),
        "tensor 'a' ends at byte .*, and the file",
    ),
    "a tensor that is too large": (gguf({}, {"a": Made(0, (2**40, 2**40), bytes(4))}), "tensor 'a' ends at byte"),
    "a crooked offset": (gguf({}, {"a": FLOATS._replace(offset=1)}), "begins at 1, which is not a multiple of 32"),
    "a crooked alignment": (gguf({"general.alignment": 48}), "general.alignment is 48, and should be a power of two"),
    "an alignment that is no number": (gguf({"general.alignment": "32"}), "general.alignment is '32'"),
    "one of two parts": (gguf({"split.count": 2}), r"one of 2 parts; give the first, .* in -00001-of-00002\.gguf"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_refused_in_one_line(tmp_path: Path, lie: str) -> None:
    data, message = LIES[lie]
    with pytest.raises(ModelError, match=message) as refusal:
        opened(tmp_path, data)
    assert str(refusal.value).startswith(f"cannot read {tmp_path / 'model.gguf'}: ")
    assert ";" in str(refusal.value)  # what to do
    assert "\n" not in str(refusal.value)


def test_a_header_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    whole = gguf({"general.architecture": "llama", "texts": ["a", "b"]}, {"floats": FLOATS})
    for size in range(len(whole)):
        with pytest.raises(ModelError, match="cannot read"):
            opened(tmp_path, whole[:size])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*nothing\.gguf: No such file"):
        open_gguf(tmp_path / "nothing.gguf")


# ---- files in parts ----


def part(number: int, count: int = 2, tensors: int = 2, **named: Made) -> bytes:
    more = {"general.architecture": "llama", "split.tensors.count": tensors} if number == 0 else {}
    return gguf({**more, "split.no": number, "split.count": count}, named)


def test_all_parts_are_opened(tmp_path: Path) -> None:
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(part(1, floats=FLOATS, blocks=BLOCKS))
    found = opened(tmp_path, part(0), "m-00001-of-00002.gguf")
    assert found.metadata["general.architecture"] == "llama"
    assert list(found.tensors) == ["floats", "blocks"]
    assert len(found.maps) == 2


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (part(0, a=FLOATS), None, r"m-00002-of-00002\.gguf: No such file"),
        (part(0, a=FLOATS), part(0, b=FLOATS), "00002.gguf: it is not part 2 of 2; the parts do not belong together"),
        (part(0, a=FLOATS), part(1, 3, b=FLOATS), "00002.gguf: it is not part 2 of 2"),
        (part(0, a=FLOATS), gguf({}, {"b": FLOATS}), "00002.gguf: it is not part 2 of 2"),
        (part(1, a=FLOATS), part(1, b=FLOATS), "00001-of-00002.gguf: it is not part 1 of 2"),
        (part(0, 3, a=FLOATS), part(1, b=FLOATS), "one of 3 parts; give the first, .* in -00001-of-00003.gguf"),
        (part(0, a=FLOATS), part(1, a=FLOATS), "tensor 'a' is in an earlier part as well"),
        (part(0, tensors=3, a=FLOATS), part(1, b=FLOATS), "its parts hold 2 tensors, and should hold 3"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, first: bytes, second: bytes | None, message: str
) -> None:
    if second is not None:
        (tmp_path / "m-00002-of-00002.gguf").write_bytes(second)
    with pytest.raises(ModelError, match=message):
        opened(tmp_path, first, "m-00001-of-00002.gguf")
