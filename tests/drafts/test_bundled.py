"""Drafts that come with the package: for their target only, spelt out by name, small, and with a card."""

import json

import pytest
import torch
from conftest import byte_tokenizer, tiny_llama
from test_heads import draft_for

from specinfer import BestFirst, Memory, SpeculativeDecoder
from specinfer.drafts import bundled as bundled
from specinfer.drafts.bundled import FOLDER, bundled_drafts
from specinfer.drafts.head import HeadDraft
from specinfer.drafts.lookup.ngram import NGramDraft

LIMIT = 40_000_000  # bytes, in all
HEADS = sorted(FOLDER.glob("*/"))


def test_there_are_two_and_they_are_small():
    assert len(HEADS) >= 2
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < LIMIT


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_each_has_a_card_and_loads(folder):
    assert "SmolLM2-135M-Instruct" in (folder / "README.md").read_text()
    assert json.loads((folder / "config.json").read_text())["fingerprint"]["vocab_size"] == 49_152
    head = HeadDraft.load(folder).head
    assert all(torch.isfinite(weight).all() for weight in head.parameters())


def test_other_targets_get_none():
    target = tiny_llama()
    assert [*bundled_drafts(target, byte_tokenizer())] == []
    assert [draft.name for draft in SpeculativeDecoder(target, byte_tokenizer()).drafts] == ["recycling", "suffix"]


def test_their_target_gets_them_by_name(monkeypatch, tmp_path):
    """ "auto" is the first and n-grams, "bundled" is all; ids stay the target's."""
    target, tokenizer = tiny_llama(), byte_tokenizer()
    for number in (1, 2):
        draft_for(target, f"head-{number}", seed=number).save(tmp_path / f"tiny-{number}")
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    wanted = SpeculativeDecoder(target, tokenizer, [], None).generate([5, 9], max_new_tokens=12).token_ids
    remembering = SpeculativeDecoder(target, tokenizer, memory=Memory())
    assert [draft.name for draft in remembering.drafts] == ["head-1", "suffix"]
    for drafts, names in (
        ("auto", ["head-1", "ngram"]),
        ("bundled", ["head-1", "head-2"]),
        (["bundled", NGramDraft()], ["head-1", "head-2", "ngram"]),
    ):
        decoder = SpeculativeDecoder(target, tokenizer, drafts, BestFirst(8, 3))
        assert [draft.name for draft in decoder.drafts] == names
        assert decoder.generate([5, 9], max_new_tokens=12).token_ids == wanted
