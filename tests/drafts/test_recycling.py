"""Token recycling: the table against a dict of dicts, trees against the table, ids against no speculation."""

from collections import namedtuple
from functools import cache
from math import exp

import numpy as np
import pytest
import torch
from conftest import PROMPTS, VOCAB, like, plain, tiny_llama
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY
from test_draft import context

from specinfer import BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder, TokenTree
from specinfer.drafts.lookup.recycling import ALONE, KEPT, PAIR, RecyclingDraft, RecyclingTable
from specinfer.engine.sampling import WARPERS
from specinfer.evaluation.compare.methods import HitRates
from specinfer.evaluation.traces import record, replay
from specinfer.tree import Draw, Frontier

Said = namedtuple("Said", "tree logits")
TOKENS = st.integers(0, 3)
TREE = BestFirst(30, 3)


def tree_of(root, tokens, parents):
    """A ranked tree in which every node is half as likely as its parent."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    scores = [-0.7 * depth for depth in depths[1:]]
    return TokenTree.from_nodes(root, tokens, parents, scores, [[Draw(1, 0)] for _ in tokens])


def said(tree, seed=0, vocab=VOCAB):
    """A tree with made-up logits, and rows beyond it that nobody may read."""
    torch.manual_seed(seed)
    return Said(tree, torch.cat((3 * torch.randn(len(tree), vocab), torch.full((2, vocab), torch.nan))))


def mean(old, new):
    """Half of each distribution, if there are two, cut to the likeliest tokens."""
    both = new if old is None else {token: (old.get(token, 0) + new.get(token, 0)) / 2 for token in {**old, **new}}
    return dict(sorted(both.items(), key=lambda item: -item[1])[:KEPT])


class Reference:
    """A dict of dicts: what followed the last two tokens, else the last one."""

    def __init__(self):
        self.after = {}

    def learn(self, ids, view):
        """Of equal nodes the last counts; half of what was known before stays, and the 8 likeliest are kept."""
        new = {}
        for node in range(len(view.tree)):
            text = [*ids, *view.tree.path(node)]
            q = view.logits[node].log_softmax(-1)
            top = {int(token): exp(q[token]) for token in q.topk(min(KEPT, len(q))).indices}
            new |= dict.fromkeys((tuple(text[-2:]), (text[-1],)), top)
        for key, top in new.items():
            self.after[key] = mean(self.after.get(key), top)

    def successors(self, text):
        """Token -> probability: 0.8 of what follows the pair, and 0.2 of what follows the token; or 0.6 of that."""
        pair = self.after.get(tuple(text[-2:])) if len(text) > 1 else None
        alone = self.after.get((text[-1],), {})
        found = {token: 0.8 * q for token, q in (pair or {}).items()}
        for token, q in alone.items():
            found[token] = found.get(token, 0.0) + (0.2 if pair else 0.6) * q
        return found


# ---- the table ----


@PROPERTY
@given(st.lists(st.tuples(TOKENS, TOKENS, st.integers(0, 6)), max_size=60), st.integers(1, 12))
def test_the_table_is_a_dict_that_forgets_its_oldest_keys(learnt, entries):
    """Pairs and single tokens share the slots; a key that is learnt again keeps its slot."""
    table, wanted = RecyclingTable(entries), {}
    for a, b, value in learnt:
        table.learn([(a, b)], np.array([[value, value + 1]]), np.array([[0.75, 0.25]]))
        new = {key: mean(wanted.get(key), {value: 0.75, value + 1: 0.25}) for key in ((a, b), (-1, b))}
        for key, distribution in new.items():
            if key not in wanted and len(wanted) == entries:
                del wanted[next(iter(wanted))]
            wanted[key] = distribution
    asked = [(a, b) for a in range(4) for b in range(4)]
    for (a, b), tokens, probs in zip(asked, *(column.tolist() for column in table.successors(asked)), strict=True):
        reference = {token: PAIR * q for token, q in wanted.get((a, b), {}).items()}
        for token, q in wanted.get((-1, b), {}).items():
            reference[token] = reference.get(token, 0.0) + (1 - PAIR if (a, b) in wanted else ALONE) * q
        found = {token: q for token, q in zip(tokens, probs, strict=True) if q}
        assert found == pytest.approx(reference)
        assert list(found.values()) == sorted(found.values(), reverse=True)
    assert len(table.slots) <= entries


# ---- trees ----


def grown(session, policy=TREE):
    return session.propose(policy, [end[1] for end in session.ends], policy.max_depth)


def check(tree, ids, reference):
    """Every edge is what the reference says after the node's last two tokens."""
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        q = reference.successors([*ids, *tree.path(parent)])[int(tree.tokens[node])]
        assert tree.probability(node) == pytest.approx(q, rel=1e-4)


def test_trees_hold_what_the_target_said_at_rejected_nodes_and_in_retired_rows():
    """Ragged rows, one of them retired: every node of every row teaches all rows."""
    rows = [[5, 1], [7], [2, 9, 4]]
    session, reference = RecyclingDraft().open(context(rows)), Reference()
    assert [len(tree) for tree in grown(session)] == [1, 1, 1]
    trees = [
        tree_of(1, [2, 3, 2, 9], [0, 0, 2, 3]),
        tree_of(7, [8, 8, 9], [0, 1, 1]),
        tree_of(4, [], []),
    ]
    views = [said(tree, seed) for seed, tree in enumerate(trees)]
    for ids, view in zip(rows, views, strict=True):
        reference.learn(ids, view)
    session.commit([[3, 2], None, [8, 8]], (), views)
    rows = [[5, 1, 3, 2], [2, 9, 4, 8, 8]]
    trees = grown(session)
    for ids, tree in zip(rows, trees, strict=True):
        assert len(tree) > KEPT
        check(tree, ids, reference)
    first = {int(trees[1].tokens[child]) for child in trees[1].children(0)}
    assert first <= set(reference.after[8, 8])  # what the retired row's second level taught


@pytest.mark.parametrize("policy", [BestFirst(20, 4), Expansion((3, 2, 2)), Chain(3), Expansion((12,))], ids=str)
def test_policies_get_what_the_table_has(policy):
    """A policy that wants more children than an entry has gets those there are."""
    session, reference = RecyclingDraft().open(context([[5, 1]])), Reference()
    view = said(tree_of(1, [2, 3], [0, 1]))
    reference.learn([5, 1], view)
    session.commit([[2]], (), [view])
    tree = grown(session, policy)[0]
    check(tree, [5, 1, 2], reference)
    assert 1 < len(tree) <= policy.max_nodes + 1
    after = reference.successors([1, 2])
    assert int(tree.tokens[1]) == max(after, key=after.get)


def test_a_pair_counts_for_more_than_its_last_token():
    """After 1, 2 and 3, 2 the pair decides; after 4, 2 what was said after 2, half of it each time."""
    table = RecyclingTable()
    table.learn([(1, 2)], np.array([[7]]), np.array([[0.9]]))
    table.learn([(3, 2)], np.array([[8]]), np.array([[0.9]]))
    tokens, probs = table.successors([(1, 2), (3, 2), (4, 2), (2, 4)])
    assert tokens[:3, 0].tolist() == [7, 8, 7]  # 7 and 8 are as likely after 2: the smaller id
    assert probs[:, 0] == pytest.approx(
        [PAIR * 0.9 + (1 - PAIR) * 0.45, PAIR * 0.9 + (1 - PAIR) * 0.45, ALONE * 0.45, 0.0]
    )


@pytest.mark.parametrize("vocab", [3, KEPT, VOCAB])
@pytest.mark.parametrize("replacement", [False, True])
def test_draws_come_from_the_normalised_table(vocab, replacement):
    """Tokens that are not in the table are never drawn; neither is anything after unknown ones."""
    session, reference = RecyclingDraft().open(context([[0, 1], [2]], vocab)), Reference()
    view = said(tree_of(1, [], []), vocab=vocab)
    reference.learn([0, 1], view)
    session.commit([[0, 1], [0]], (), [view, said(tree_of(2, [], []), vocab=vocab)])  # 0 was nowhere the last
    trees = grown(session, Sampled((3, 1), replacement))
    wanted = torch.zeros(vocab, dtype=torch.float64)
    for token, q in reference.successors([0, 1]).items():
        wanted[token] = q
    assert torch.allclose(torch.from_numpy(trees[0].distributions[0, 0].copy()), wanted / wanted.sum(), atol=1e-5)
    assert len(trees[1]) == 1


def test_coupled_candidates_are_ranked_by_the_targets_noise():
    """With the target's own distribution in the table, the first candidate is the target's choice, mostly."""
    hits = 0
    for seed in range(20):
        probs = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
        logits = torch.full((3, VOCAB), -30.0)
        logits[:, 10:14] = probs
        session = RecyclingDraft().open(context([[1]], coupled=True, do_sample=True, temperature=0.5))
        coupling = session.couplings[0] = type(session.couplings[0])(seed)
        session.commit([[1]], (), [Said(TokenTree.root_only(1), logits)])
        frontier = Frontier(torch.tensor([[-1]]), torch.tensor([[-1]]), torch.tensor([[True]]), 0)
        session.pairs = [[]]
        tokens, log_probs = session.top(frontier, 4)
        hits += int(tokens[0, 0, 0]) == int((logits[0] / 0.5 + coupling.at(2, VOCAB, torch.device("cpu"))).argmax())
        assert (log_probs <= 0).all()
    assert hits >= 19


# ---- decoding ----


def decoders(target, drafts, tree):
    return SpeculativeDecoder(target, None, drafts, tree), SpeculativeDecoder(target, None, (), None)


@pytest.mark.parametrize(
    ("drafts", "tree"),
    [
        (["recycling"], "auto"),
        (["recycling"], BestFirst(12, 5)),
        (["ngram", "recycling"], BestFirst(12, 5)),
        (["ngram", "recycling"], Expansion((2, 2, 1))),
    ],
    ids=str,
)
def test_ids_are_those_without_speculation(target, drafts, tree):
    """Greedy and coupled, a batch of ragged rows and one row, twice with one decoder."""
    ours, alone = decoders(target, drafts, tree)
    for options in ({"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}):
        for prompts in (PROMPTS, PROMPTS[2:3]):
            found, wanted = (each.generate(prompts, max_new_tokens=16, **options) for each in (ours, alone))
            assert [result.token_ids for result in found] == [result.token_ids for result in wanted]


WARPED = {  # a value of each option that warps what tokens are drawn from
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.8,
    "min_p": 0.05,
    "typical_p": 0.8,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "top_h": 0.4,
}


@pytest.fixture(scope="module")
def warped(target):
    """Options with a warper, and the ids that they give without speculation."""
    _, alone = decoders(target, ["ngram"], None)

    @cache
    def found(warper):
        options = {"temperature": 0.9, warper: WARPED.get(warper, True), "seed": 3, "max_new_tokens": 12}
        return options, [result.token_ids for result in alone.generate(PROMPTS, **options)]

    return found


@pytest.mark.parametrize("warper", [*WARPERS, "renormalize_logits", "remove_invalid_values"])
@pytest.mark.parametrize("draft", ["recycling", "ngram", "suffix", "lookahead", "ngram recycling"])
def test_no_warper_sees_what_is_no_distribution(target, warped, draft, warper):
    """A table knows nothing of most nodes at first; look-ups rank without warpers.  A batch of ragged rows."""
    ours, _ = decoders(target, draft.split(), "auto" if draft == "lookahead" else BestFirst(12, 5))
    options, wanted = warped(warper)
    assert [result.token_ids for result in ours.generate(PROMPTS, **options)] == wanted


@pytest.mark.parametrize("warper", WARPERS)
@pytest.mark.parametrize("vocab", [5, VOCAB])
def test_unknown_nodes_have_no_children_whatever_warps(warper, vocab):
    """Ranked and drawn: a row that was told something beside one that was not; few or many tokens."""
    options = {"temperature": 0.9, warper: WARPED[warper], "do_sample": True}
    for policy, coupled in ((Expansion((2, 1)), True), (Sampled((2, 1)), False)):
        session = RecyclingDraft().open(context([[0, 1], [2]], vocab, coupled=coupled, **options))
        session.commit(
            [[0, 1], [0]], (), [said(tree_of(1, [], []), vocab=vocab), said(tree_of(2, [], []), vocab=vocab)]
        )
        trees = grown(session, policy)
        assert [len(tree) > 1 for tree in trees] == [True, False]
        assert np.isfinite(trees[0].scores).all()


def test_merged_with_a_model_ids_hold_and_each_is_named(target, near):
    decoder = SpeculativeDecoder(target, None, [near, "recycling"], BestFirst(12, 5))
    result = decoder.generate(PROMPTS[0], max_new_tokens=24, temperature=0)
    assert result.token_ids == plain(target, PROMPTS[0])
    assert [draft.draft for draft in result.stats.drafts] == [decoder.drafts[0].name, "recycling"]


def test_sampled_trees_decode(target):
    """Multi-step sampling over the table's draws: texts of the right length, and of the same seed the same."""
    texts = []
    for _ in range(2):
        decoder = SpeculativeDecoder(target, None, ["recycling"], Sampled((2, 1)))
        texts.append(decoder.generate(PROMPTS[0], max_new_tokens=20, temperature=1.0, seed=4).token_ids)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 20


def test_what_one_call_taught_the_next_one_uses_and_other_decoders_do_not(target):
    """The table belongs to the decoder: the caller's draft and other decoders stay as they are."""
    draft = RecyclingDraft()
    first, second = (SpeculativeDecoder(target, None, [draft], BestFirst(12, 5)) for _ in range(2))
    passes = [
        decoder.generate(PROMPTS[0], max_new_tokens=30, temperature=0).stats.target_passes
        for decoder in (first, first, second)
    ]
    assert passes[1] < passes[0] == passes[2]
    assert not draft.table.slots


def test_interleaved_streams_do_not_change_each_other(target, tokenizer):
    """Trees may differ, texts may not; the table is small, so that streams overwrite each other's entries."""
    decoder = SpeculativeDecoder(target, tokenizer, ["recycling"], BestFirst(12, 5))
    decoder.drafts[0].table = RecyclingTable(20)
    options = {"max_new_tokens": 30, "temperature": 0, "raw": True}
    streams = [decoder.stream(prompt, **options) for prompt in ("abab", "zyzyzy")]
    waiting = [iter(stream) for stream in streams]
    while waiting:
        waiting = [each for each in waiting if next(each, None) is not None]
    for stream, prompt in zip(streams, ("abab", "zyzyzy"), strict=True):
        assert stream.result.token_ids == plain(target, tokenizer(prompt).input_ids, 30)


def test_small_and_padded_vocabularies():
    """Fewer tokens than an entry holds."""
    model = tiny_llama(3, vocab=5)
    decoder, alone = decoders(model, ["recycling"], BestFirst(12, 5))
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 2}):
        found, wanted = (each.generate([1, 2], max_new_tokens=20, **options) for each in (decoder, alone))
        assert found.token_ids == wanted.token_ids


def test_a_recording_begins_with_an_empty_table(target):
    """So it repeats itself, whatever the decoder decoded before; and it can be replayed."""
    decoder = SpeculativeDecoder(target, None, ["recycling"], BestFirst(12, 5))
    before = record(decoder, PROMPTS, max_new_tokens=30)
    decoder.generate(PROMPTS, max_new_tokens=30, temperature=0)
    again = record(decoder, PROMPTS, max_new_tokens=30)
    assert [text.to_bytes() for text in before.texts] == [text.to_bytes() for text in again.texts]
    assert before.drafts == ["recycling"]
    assert min(replay(again, BestFirst(12, 5)).tokens_per_pass) >= 1


def test_hit_rates_ask_the_draft_that_is_attached(target):
    """Every text is counted anew; a table learns from the texts before it."""
    rates = HitRates(SpeculativeDecoder(target, None, ["recycling", like(target)], BestFirst(12, 5)))
    first, second = (rates.count(PROMPTS[2], 0, {"max_new_tokens": 40, "temperature": 0})[0] for _ in range(2))
    assert first["positions"] <= second["positions"] == 39
    assert second["hits"][0] > 25 > first["hits"][0]  # it has seen the whole text
