"""Lookahead: windows and pools against the paper's, in plain loops; ids against no speculation."""

from collections import namedtuple
from math import exp

import pytest
import torch
from conftest import PROMPTS, VOCAB, ends, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import PROPERTY
from test_draft import context

from specinfer import Auto, BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder
from specinfer.drafts.lookup.lookahead import LookaheadDraft, Window
from specinfer.errors import InputError, PolicyError
from specinfer.evaluation.traces import record

Said = namedtuple("Said", "tree logits")
CPU = torch.device("cpu")
SIZES = st.builds(LookaheadDraft, st.integers(1, 6), st.integers(2, 5), st.integers(1, 3))


# ---- the paper's window ----


class Paper:
    """The two-dimensional window of the paper (Figure 3) and its pool, with a fresh pass for every guess.

    Args:
        choice: ids -> the target's next token.
        draft: the sizes.
        first: the first row, whose first token is the end of the text.
    """

    def __init__(self, choice, draft, first):
        self.choice, self.draft, self.rows, self.pool = choice, draft, [list(first)], {}

    def step(self, ids):
        """Take one Jacobi step of all columns after the text, which then grows by one token."""
        n, window = self.draft.ngram, self.draft.window
        new = []
        for column in range(window):
            seen = self.rows[0][1 : column + 1] + [row[column] for row in self.rows[1:]]
            new.append(self.choice([*ids, *seen]))
        if len(self.rows) < n - 1:  # the first steps fill the window
            self.rows = [[*row[1:], None] for row in [*self.rows, new]]
        else:
            for column in range(window):
                token, *rest = [row[column] for row in [*self.rows, new]]
                kept = self.pool.setdefault(token, [])
                if tuple(rest) in kept:
                    kept.remove(tuple(rest))
                kept.append(tuple(rest))
                del kept[: -self.draft.guesses]
            self.rows = [*self.rows[1:], new]
        self.rows[0][0] = self.choice(ids)


def step(session, rows, choose):
    """Score all nodes of a step's trees, commit what exact match accepts; return the trees and the tokens."""
    trees, views, committed = session.propose(BestFirst(500, 50), ends(rows), 50), [], []
    for ids, tree in zip(rows, trees, strict=True):
        logits = torch.zeros(len(tree) + 1, VOCAB)  # a row more, as where rows are ragged
        choices = [choose([*ids, *tree.path(node)]) for node in range(len(tree))]
        logits[range(len(tree)), choices] = 50.0
        node, tokens = 0, [choices[0]]
        while (child := tree.child(node, tokens[-1])) is not None:
            node = child
            tokens.append(choices[child])
        views.append(Said(tree, logits))
        committed.append(tokens)
    session.commit(committed, (), views)
    for ids, tokens in zip(rows, committed, strict=True):
        ids += tokens
    return trees, committed


def jumbled(ids):
    """A target that depends on the last two tokens and often repeats itself."""
    return (7 * ids[-1] + 3 * ids[-2] + 5) % 11 if len(ids) > 1 else 4


@pytest.mark.parametrize("sizes", [(5, 4, 3), (4, 2, 2), (6, 3, 1), (3, 5, 7)], ids=str)
def test_windows_and_pools_are_the_papers(sizes):
    """Rows are compared until a step commits several tokens, and filled columns wherever the paper's are filled."""
    draft, ids = LookaheadDraft(*sizes), [5, 9, 3]
    compared = 0

    def choice(seen):  # so new that no guess is ever right: every step commits one token
        return 100 + (sum(seen) * 31 + len(seen) * 7) % 160

    session = draft.open(context([ids]))
    window = session.windows[0]
    paper = Paper(choice, draft, window.rows[0])
    for _ in range(9):
        paper.rows = [
            [ours if theirs is None else theirs for ours, theirs in zip(*pair, strict=True)]
            for pair in zip(window.rows, paper.rows, strict=True)
        ]
        before = list(ids)
        _, (tokens,) = step(session, [ids], choice)
        if len(tokens) > 1:
            break
        paper.step(before)
        compared += 1
        for ours, theirs in zip(window.rows, paper.rows, strict=True):
            assert [o for o, t in zip(ours, theirs, strict=True) if t is not None] == [
                t for t in theirs if t is not None
            ]
        assert {token: list(kept) for token, kept in window.pool.items()} == paper.pool
    assert compared > draft.ngram
    assert paper.pool


@settings(PROPERTY, max_examples=15)
@given(SIZES, st.integers(0, 10))
def test_every_pooled_ngram_is_the_targets_and_every_tree_fits(draft, start):
    """Whatever is accepted: windows keep their sizes, trees their bounds, and rows begin with the newest token."""
    rows = [[start, 3], [4]]
    session = draft.open(context(rows))
    for _ in range(12):
        trees, _ = step(session, rows, jumbled)
        for tree in trees:
            assert tree.num_drafted <= draft.nodes
            assert tree.depth <= draft.depth
        for ids, window in zip(rows, session.windows, strict=True):
            assert window.rows[0][0] == ids[-1]
            assert {len(row) for row in window.rows} == {draft.window}
            assert len(window.rows) <= draft.ngram - 1
            assert all(0 < len(kept) <= draft.guesses for kept in window.pool.values())
            assert all(len(ngram) == draft.ngram - 1 for kept in window.pool.values() for ngram in kept)


def test_all_rows_wait_for_their_device_once(waits):
    rows = [[5, 3], [4], [1, 2]]
    session = LookaheadDraft(3, 3, 2).open(context(rows))
    for _ in range(4):
        waits.clear()
        step(session, rows, jumbled)
        assert waits == ["tolist"]


def test_a_window_moves_with_the_text():
    """Three committed tokens: the guess about position i + 3 becomes the guess about position i."""
    window = Window(LookaheadDraft(6, 3, 2), [9], 1)
    window.rows = [[9, 1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16]]
    window.advance([22, 23, 24, 25, 26, 27], [11, 12, 77])
    assert window.rows == [[77, 14, 15, 16, 9, 9], [24, 25, 26, 27, 9, 9]]
    assert list(window.pool[9]) == [(11, 22)]
    assert list(window.pool[5]) == [(16, 27)]


def test_the_pool_keeps_the_newest_continuations():
    window = Window(LookaheadDraft(1, 2, 2), [9], 1)
    for token in (1, 2, 1, 3):
        window.rows = [[9]]
        window.advance([token], [token])
    assert list(window.pool[9]) == [(1,), (3,)]


def test_columns_that_were_not_scored_teach_nothing():
    """A tree is cut where a row may not emit more."""
    window = Window(LookaheadDraft(2, 2, 2), [9], 1)
    window.rows = [[9, 5]]
    window.advance([4, None], [4])
    assert dict(window.pool) == {9: {(4,): None}}


def test_guesses_share_their_paths_and_the_window_is_never_cut():
    """Three guesses, two of which begin alike, beside a window whose nodes have score 0."""
    draft = LookaheadDraft(2, 3, 3)
    session = draft.open(context([[9]]))
    session.windows[0].rows = [[9, 5], [6, 7]]
    session.windows[0].pool[9] = dict.fromkeys([(1, 2), (1, 3), (4, 5)])
    tree = session.propose(BestFirst(50, 9), [9], 9)[0]
    scores = {tuple(tree.path(node)): exp(tree.scores[node]) for node in range(1, len(tree))}
    guesses = {(1,): 2 / 4, (1, 2): 1 / 4, (1, 3): 1 / 4, (4,): 1 / 4, (4, 5): 1 / 4}
    assert scores == pytest.approx({(5,): 1, (6,): 1, (5, 7): 1, **guesses})
    assert {tuple(path) for path in map(tree.best(3, tree.scores).path, range(1, 4))} == {(5,), (6,), (5, 7)}


def test_coupled_guesses_are_the_targets_choices_with_its_noise():
    """The next iterate is the argmax of scores plus noise of the position, after temperature."""
    draft = LookaheadDraft(3, 3, 2)
    session = draft.open(context([[5, 9]], coupled=True, do_sample=True, temperature=0.7, top_k=0))
    coupling, window = session.couplings[0], session.windows[0]
    tree = session.propose(BestFirst(50, 9), [9], 9)[0]
    torch.manual_seed(0)
    logits = torch.randn(len(tree), VOCAB)
    ends = [0, *(next(n for n in range(len(tree)) if tree.path(n) == path) for path in window.paths()[1:])]
    wanted = [int((logits[node] / 0.7 + coupling.at(2 + int(tree.depths[node]), VOCAB, CPU)).argmax()) for node in ends]
    session.commit([[wanted[0]]], (), [Said(tree, logits)])
    assert window.rows[1][:2] == wanted[1:]


def test_a_text_that_repeats_is_drafted():
    """A target that counts to five again and again: soon the pool and the window know what comes."""
    ids = [5, 1]
    session = LookaheadDraft(5, 3, 3).open(context([ids]))
    for _ in range(15):
        step(session, [ids], lambda seen: seen[-1] % 5 + 1)
    assert len(ids) > 2 + 2 * 15


# ---- decoding ----


@pytest.mark.parametrize(
    ("drafts", "tree"),
    [
        (["lookahead"], "auto"),
        ([LookaheadDraft(4, 3, 2)], BestFirst(12, 4)),
        (["ngram", LookaheadDraft(3, 4, 2)], BestFirst(40, 6)),
    ],
    ids=["auto", "best-first", "merged"],
)
def test_ids_are_those_without_speculation(target, drafts, tree):
    """Greedy and coupled, a batch of ragged rows and one row, to the very end."""
    ours = SpeculativeDecoder(target, None, drafts, tree)
    alone = SpeculativeDecoder(target, None, (), None)
    for options in ({"temperature": 0}, {"temperature": 0.8, "top_k": 9, "seed": 3}):
        for prompts in (PROMPTS, PROMPTS[2:3]):
            found, wanted = (each.generate(prompts, max_new_tokens=16, **options) for each in (ours, alone))
            assert [result.token_ids for result in found] == [result.token_ids for result in wanted]
    assert found[0].stats.drafts[-1].draft == "lookahead"


@pytest.mark.parametrize("name", ["lookahead", "recycling", "suffix", "ngram"])
def test_behind_a_gate_nothing_is_missed(target, name):
    """In steps of bare roots nobody is asked; what the target said there is told in that step to those who need it."""
    ours = SpeculativeDecoder(target, None, [name], "auto", confidence_gate=0.2)
    alone = SpeculativeDecoder(target, None, (), None)
    for options in ({"temperature": 0}, {"temperature": 1.5, "seed": 3}):
        found, wanted = (each.generate(PROMPTS, max_new_tokens=16, **options) for each in (ours, alone))
        assert [result.token_ids for result in found] == [result.token_ids for result in wanted]
        sizes = {len(step.tree) for result in found for step in result.steps[:-1]}
        assert 1 in sizes
        assert name == "ngram" or max(sizes) > 1


def test_interleaved_streams_do_not_change_each_other(target, tokenizer):
    decoder = SpeculativeDecoder(target, tokenizer, [LookaheadDraft(4, 3, 2)], BestFirst(30, 8))
    streams = [decoder.stream(prompt, max_new_tokens=20, temperature=0, raw=True) for prompt in ("abab", "zyzyzy")]
    waiting = [iter(stream) for stream in streams]
    while waiting:
        waiting = [each for each in waiting if next(each, None) is not None]
    for stream, prompt in zip(streams, ("abab", "zyzyzy"), strict=True):
        assert stream.result.token_ids == plain(target, tokenizer(prompt).input_ids, 20)


# ---- what is refused ----


@pytest.mark.parametrize(
    "tree", [BestFirst(4, 8), BestFirst(40, 2), Chain(60), Expansion((2, 2)), Sampled((2, 1))], ids=str
)
def test_policies_that_would_cut_the_window_are_refused(target, tree):
    with pytest.raises(PolicyError, match=r"window of lookahead .* at least 11 nodes and depth 4"):
        SpeculativeDecoder(target, None, [LookaheadDraft(4, 3, 2)], tree)


def test_auto_becomes_best_first_with_room_for_other_drafts(target):
    decoder = SpeculativeDecoder(target, None, ["ngram", LookaheadDraft(4, 3, 2)], Auto(10, 6))
    assert decoder.policy == BestFirst(21, 6, 0.05)


@pytest.mark.parametrize(
    "sizes", [{"window": 0}, {"ngram": 1}, {"guesses": 0}, {"window": 2.5}, {"guesses": True}], ids=str
)
def test_sizes_are_whole_numbers(sizes):
    with pytest.raises(InputError, match=next(iter(sizes))):
        LookaheadDraft(**sizes)


def test_a_recording_refuses_it_by_name(target):
    """It would be recorded as a draft that proposes nothing."""
    decoder = SpeculativeDecoder(target, None, ["lookahead"])
    with pytest.raises(InputError, match="lookahead proposes its trees whole"):
        record(decoder, PROMPTS, max_new_tokens=4)
