"""The benchmark of growth: that every part runs on a tiny model, and that its figures agree with each other."""

import json
import math
import sys

import pytest


@pytest.fixture(scope="module")
def growth(script):
    """The script."""
    return script("growth")


@pytest.fixture(scope="module")
def written(growth, tmp_path_factory):
    """What a tiny run writes."""
    path = tmp_path_factory.mktemp("growth") / "growth.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["growth.py", "--tiny", "--out", str(path), "--minutes", "60"])
        with pytest.raises(SystemExit) as end:
            growth.main()
    data = json.loads(path.read_text())
    assert end.value.code == 0, data["left_out"]
    return data


def test_every_part_has_its_rows(growth, written):
    small = growth.SMALL
    assert written["left_out"] == []
    assert set(written["seconds"]) == set(growth.SHARES)
    assert [row["rows"] for row in written["batch"]] == list(small.batches)
    assert [row["context"] for row in written["context"]] == list(small.contexts)
    assert [row["new tokens"] for row in written["tokens"]] == list(small.tokens)
    assert [row["drafted"] for row in written["nodes"]] == list(small.nodes)
    rated = [row for part in ("batch", "context", "tokens") for row in written[part]]
    assert all(row["worst"] == min(row["ratios"]) and len(row["ratios"]) == row["texts"] for row in rated)


def test_the_tables_name_every_row(growth, written):
    lines = [line for line in growth.tables(written).splitlines() if line.startswith("| ")]
    rows = sum(len(written[part]) for part in growth.TABLES)
    assert len(lines) == rows + 2 * sum(bool(written[part]) for part in growth.TABLES)


def test_only_the_parts_asked_for_run(growth, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["growth.py", "--tiny", "--parts", "nodes"])
    with pytest.raises(SystemExit) as end:
        growth.main()
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "**nodes**" in printed
    assert "**batch**" not in printed


def test_methods_take_turns_over_the_same_text(growth):
    """Without speculation each stop is met exactly; drafts overshoot one and make up for it at the next."""
    subject = growth.pair(None, [], "float32", True)
    trees = {"auto": growth.BestFirst(4, 3), "plain": None}
    decoders = {name: growth.decoder(subject.model, None, subject.drafts, tree) for name, tree in trees.items()}
    found = growth.race(decoders, subject.prompts(2, 0), (3, 6, 9), skipped=1)
    assert [(turn.tokens, turn.passes) for turn in found.slices["plain"]] == [(6, 6), (6, 6)]
    drafted = sum(found.slices["auto"], growth.Slice())
    assert drafted.tokens > drafted.passes
    assert 12 - 6 <= drafted.tokens <= 12 + 6  # two rows overshoot by three drafted tokens at most


def test_ratios_are_medians_over_texts(growth):
    races = [
        growth.Race({"auto": [growth.Slice(8, 1.0, 4)], "plain": [growth.Slice(8, plain, 8)]}, {"auto": 1, "plain": 2})
        for plain in (0.5, 2.0, 3.0)
    ]
    row = growth.rates_row(races)
    assert row["auto / plain"] == 2.0
    assert row["worst"] == 0.5
    assert math.isclose(row["plain"], 4.0)
    assert row["tokens/pass"] == 2.0
