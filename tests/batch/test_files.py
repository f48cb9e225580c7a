"""Files that are whole or absent, JSON that is none, and folders that one run at a time fills."""

import errno
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specinfer.common.files import LOCK, UNFINISHED, locked, parse_json, read_json, write_json, write_whole
from specinfer.drafts.head import read_config
from specinfer.errors import InputError, SpecinferError
from specinfer.prompts import read_rows

HOLD = """
import sys
from pathlib import Path
from specinfer.common.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def other_run(tmp_path):
    """Another process that holds a folder until it is told to end, or killed."""
    command = [sys.executable, "-P", "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


# ---- whole or absent ----


def test_a_whole_file_takes_the_place_of_the_one_before(tmp_path):
    for data in ("one", b"two"):
        write_whole(tmp_path / "new" / "file", data)
    assert [path.read_text() for path in (tmp_path / "new").iterdir()] == ["two"]


def test_a_folder_in_the_home_is_one_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with locked("~/out") as folder:
        write_json("~/out/settings.json", {})
        assert folder == tmp_path / "out"
        assert (folder / "settings.json").exists()
    assert {path.name for path in folder.iterdir()} == {"settings.json", LOCK}


def test_no_folder_is_a_temporary_one():
    with locked(None) as folder:
        write_json(folder / "settings.json", {})
    assert not folder.exists()


def test_others_may_read_what_they_may_read_elsewhere(tmp_path):
    (tmp_path / "plain").write_text("")
    write_whole(tmp_path / "file", "")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_link_in_the_way_of_a_temporary_name_is_not_followed(tmp_path):
    """Somebody who may write to the folder could have other files overwritten."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    folder = tmp_path / "out"
    folder.mkdir()
    for name in (".file.new", "file.new", ".file.tmp"):
        (folder / name).symlink_to(mine)
    write_whole(folder / "file", "data")
    (folder / "linked").symlink_to(mine)
    write_whole(folder / "linked", "data")  # the link is replaced, not what it points to
    assert mine.read_text() == "precious"
    assert (folder / "file").read_text() == (folder / "linked").read_text() == "data"


def test_many_writers_of_one_file_leave_one_whole_file(tmp_path):
    """Each writes under a name of its own."""
    texts = [str(i) * 200_000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_whole(tmp_path / "file", text), texts * 4))
    assert (tmp_path / "file").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_nothing_behind(call, number, tmp_path, monkeypatch):
    write_whole(tmp_path / "file", "before")

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(SpecinferError, match="file"):
        write_whole(tmp_path / "file", "after")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """And its name, when the call returns."""
    calls = []
    for name in ("fsync", "replace"):
        own = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, own=own, name=name: (calls.append(name), own(*given))[1])
    write_whole(tmp_path / "file", "data")
    assert calls == ["fsync", "replace", "fsync"]


# ---- one run at a time ----


def test_a_folder_is_held_by_one_run(tmp_path):
    with locked(tmp_path), pytest.raises(InputError, match=re.escape(f"another run writes to {tmp_path}: wait")):
        locked(tmp_path).__enter__()
    with locked(tmp_path), locked(tmp_path / "another"):
        pass


def test_a_folder_is_held_against_other_threads(tmp_path):
    def attempt():
        with locked(tmp_path):
            pass

    with ThreadPoolExecutor(1) as pool, locked(tmp_path), pytest.raises(InputError, match="another run"):
        pool.submit(attempt).result()


def test_a_killed_process_holds_nothing(other_run, tmp_path):
    with pytest.raises(InputError, match="another run"), locked(tmp_path):
        pass
    other_run.kill()
    other_run.wait()
    with locked(tmp_path):
        pass


def test_an_error_lets_go_of_the_folder(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


def test_what_killed_runs_left_half_written_is_removed(tmp_path, monkeypatch):
    """In the folder and those in it, and nothing else."""
    kept = [tmp_path / "a.new", tmp_path / ".file.new", tmp_path / ".0123456789abcdeg.new"]
    for path in kept:
        path.write_text("")
    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        killed.setattr(os, "replace", lambda *_: 1 / 0)
        for path in (tmp_path / "file", tmp_path / "text" / "file"):
            with pytest.raises(ZeroDivisionError):
                write_whole(path, "half")
    assert len(list(tmp_path.rglob(UNFINISHED))) == 2
    with locked(tmp_path):
        assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / ".lock", tmp_path / "text"])
        assert list((tmp_path / "text").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"), locked(tmp_path / "file" / "out"):
        pass


# ---- JSON ----


@pytest.mark.parametrize(
    "text",
    [DEEP, DEEP.replace("[", '{"a":').replace("]", "}"), "[" * 60 + "]" * 60, "[", "1" * 5000],
    ids=["lists", "objects", "60 deep", "cut off", "digits"],
)
def test_json_that_is_none_is_one_line(text, tmp_path):
    """Lists in lists without end among it."""
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        parse_json(text)
    path = tmp_path / "config.json"
    path.write_text(text + "\n")
    for read in (read_json, lambda path: list(read_rows(path)), lambda path: read_config(path.parent)):
        with pytest.raises(SpecinferError, match=str(tmp_path)) as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_json_of_every_kind_is_read_back(tmp_path):
    value = {"a": [1, 2.5, None, True, "x", {"b": [[[]]]}], "": {}}
    write_json(tmp_path / "file", value)
    assert read_json(tmp_path / "file") == value == parse_json(json.dumps(value))
