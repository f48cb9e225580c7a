"""The n-gram draft: PPM-C by hand, the index against brute force, rows of a batch, trees, and sampled distributions."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import PROMPTS, VOCAB, byte_tokenizer, ends
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY
from test_draft import context

from specinfer import BestFirst, Chain, Expansion, Memory, Sampled, SpeculativeDecoder
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.drafts.lookup.suffix import SuffixDraft
from specinfer.drafts.lookup.text_index import RECENT, TextIndex, successors
from specinfer.errors import InputError
from specinfer.prompts import encode, tokenized


def index(ids, max_ngram):
    """The index of a text as the n-gram draft keeps it."""
    text = TextIndex(range(1, max_ngram + 1), max_ngram)
    text.extend(ids)
    return text


def after(ids, path, max_ngram):
    """What follows the text's end extended by a path."""
    return successors(tuple([*ids, *path][-max_ngram:]), [index(ids, max_ngram)])


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def test_ppm_c_by_hand():
    """a b c a b d a b: after "a b" c and d, each seen once; after "b" the same; escape 2/4 each time."""
    distribution = after([0, 1, 2, 0, 1, 3, 0, 1], [], 2)
    assert distribution == pytest.approx({2: 1 / 4 + 1 / 2 * 1 / 4, 3: 1 / 4 + 1 / 2 * 1 / 4})


def test_ppm_c_with_unequal_counts_by_hand():
    """After "a": b b c, so b 2/5, c 1/5 and 2/5 is left to nothing shorter."""
    assert after([0, 1, 0, 1, 0, 2, 0], [], 1) == pytest.approx({1: 2 / 5, 2: 1 / 5})


def test_the_longest_context_comes_first():
    """A successor of the long context outranks a more frequent one of the short context."""
    ids = [5, 1, 8, 6, 1, 9, 7, 1, 9, 4, 1, 9, 5, 1]
    distribution = after(ids, [], 2)
    assert max(distribution, key=distribution.get) == 8
    assert index(ids, 2).occurrences((5, 1), 1) == [(2, 2)]


def test_nothing_repeats_nothing_is_said():
    """Unseen contexts have no successors; nor does a text of one token."""
    assert after([1, 2, 3], [], 4) == {}
    assert after([1], [], 4) == {}
    assert after([1, 2, 1], [3], 4) == {}
    assert after([1, 2, 1], [2], 4) == pytest.approx({1: 1 / 2 + 1 / 2 * 1 / 2})


def brute(ids, path, max_ngram):
    """PPM-C by scanning the text for every suffix of the extended text, no index."""
    end = [*ids, *path]
    distribution, left = Counter(), 1.0
    for n in range(min(max_ngram, len(end)), 0, -1):
        context = end[-n:]
        places = [i for i in range(n, len(ids)) if ids[i - n : i] == context][-RECENT:]
        counts = Counter(ids[i] for i in places)
        if counts:
            for token, count in counts.items():
                distribution[token] += left * count / (len(places) + len(counts))
            left *= len(counts) / (len(places) + len(counts))
    return dict(distribution)


@PROPERTY
@given(TEXTS, TEXTS.map(lambda t: t[:3]) | st.just([]), st.integers(1, 5))
def test_the_index_equals_brute_force(ids, path, max_ngram):
    """Any text, path and context length; probabilities are positive and sum to less than one."""
    distribution = after(ids, path, max_ngram)
    assert distribution == pytest.approx(brute(ids, path, max_ngram))
    assert all(p > 0 for p in distribution.values())
    assert sum(distribution.values()) < 1


@PROPERTY
@given(TEXTS, TEXTS, st.integers(1, 5))
def test_extending_a_text_equals_indexing_it_whole(first, second, max_ngram):
    """The index grows with the text."""
    grown, whole = index(first, max_ngram), index([*first, *second], max_ngram)
    grown.extend(second)
    assert (grown.ids, grown.last, grown.before) == (whole.ids, whole.last, whole.before)


def test_only_recent_occurrences_are_looked_at():
    """A text that repeats for long costs no more than its last occurrences."""
    text = index([0, 1] * 500 + [0], 4)
    assert [len(text.occurrences((0, 1, 0), level)) for level in range(4)] == [RECENT, RECENT, RECENT, 0]


@pytest.mark.parametrize("policy", [BestFirst(6, 3), Expansion((2, 1)), Chain(3)], ids=str)
def test_trees_follow_the_text_and_rows_are_independent(policy):
    """Scores are PPM's, of paths found in the row's own text, in a batch as alone; commits and retirements hold."""
    rows = [[1, 2, 3, 1, 2, 4, 1], [7, 7, 7], [5], [2, 9, 2, 9, 2]]
    session = NGramDraft().open(context(rows))
    for _ in range(3):
        for ids, tree in zip(rows, session.propose(policy, ends(rows), 3), strict=True):
            alone = NGramDraft().open(context([ids])).propose(policy, ids[-1:], 3)[0]
            assert tree == alone
            for node in range(1, len(tree)):
                parent = int(tree.parents[node])
                wanted = brute(ids, tree.path(parent), 4)[int(tree.tokens[node])]
                assert tree.probability(node) == pytest.approx(wanted, rel=1e-5)
        new = [[3, 1], None, [5, 5], [9]][: len(rows)] if len(rows) == 4 else [[1], [5, 6], [2]]
        session.commit(new)
        rows = [ids + more for ids, more in zip(rows, new, strict=True) if more is not None]
        assert session.batch == len(rows)
    assert session.passes == 0


def test_a_repeated_text_is_continued():
    """The likeliest path after a repeated passage is how it went on."""
    tree = NGramDraft().open(context([[4, 5, 6, 7, 8, 1, 4, 5]])).propose(Chain(4), [5], 4)[0]
    assert tree.path(len(tree) - 1) == [6, 7, 8, 1] or list(tree.path(len(tree) - 1)) == [6, 7, 8, 1]


@pytest.mark.parametrize("replacement", [False, True])
def test_sampled_laws_are_normalised_successor_laws(replacement):
    """Draws come from PPM's successors, normalised over the target's vocabulary; none where there are none."""
    rows = [[1, 2, 3, 1, 2, 4, 1], [5]]
    trees = NGramDraft().open(context(rows)).propose(Sampled((3, 1), replacement), ends(rows), 2)
    assert len(trees[1]) == 1
    assert len(trees[0]) > 1
    for (node, _), distribution in trees[0].distributions.items():
        wanted = torch.zeros(VOCAB, dtype=torch.float64)
        for token, p in brute(rows[0], trees[0].path(node), 4).items():
            wanted[token] = p
        assert torch.allclose(torch.from_numpy(distribution.copy()), wanted / wanted.sum(), atol=1e-6)


@pytest.mark.parametrize("max_ngram", [0, -1])
def test_contexts_have_at_least_one_token(max_ngram):
    """A draft that looks nothing up is refused."""
    with pytest.raises(InputError, match="max_ngram"):
        NGramDraft(max_ngram)


def test_max_ngram_bounds_the_context():
    """With one-token contexts the longer history does not count."""
    ids = [5, 1, 8, 6, 1, 9, 7, 1, 9, 5, 1]
    short = NGramDraft(1).open(context([ids])).propose(Chain(1), [1], 1)[0]
    long = NGramDraft(2).open(context([ids])).propose(Chain(1), [1], 1)[0]
    assert (int(short.tokens[1]), int(long.tokens[1])) == (9, 8)


def test_bare_roots(near):
    """Depth zero and rows without any match give a root."""
    session = NGramDraft().open(context(PROMPTS))
    assert [len(tree) for tree in session.propose(Chain(3), ends(PROMPTS), 0)] == [1] * 4
    assert len(NGramDraft().open(context([[3]])).propose(BestFirst(4, 2), [3], 2)[0]) == 1


# ---- chat templates ----

START, END, USER, ASSISTANT, NEWLINE = 0, 1, 2, 3, 4


def chat(*messages):
    """Messages in a chat template, the last header included: (role, tokens of the text)."""
    ids = [token for role, text in messages for token in (START, role, NEWLINE, *text, END, NEWLINE)]
    return [*ids, START, ASSISTANT, NEWLINE]


def proposed(ids, draft=None):
    """All that n-grams propose after a text, when 0 and 1 are special tokens."""
    bound = (draft or NGramDraft()).attach(None, SimpleNamespace(all_special_ids=[START, END]))
    (tree,) = bound.open(context([ids], draft=0)).propose(BestFirst(12, 3), ids[-1:], 3)
    return [tree.path(node) for node in range(1, len(tree))]


@pytest.mark.parametrize("draft", [NGramDraft(), SuffixDraft()], ids=["ngram", "suffix"])
def test_headers_of_a_chat_template_propose_nothing(draft):
    """The new line before an answer is no sign of what followed other headers, nor are new lines in the answer."""
    asked = chat((USER, [10, 11, 12]))
    assert proposed(asked, draft) == []
    assert proposed([*asked, 13, NEWLINE], draft) == []
    untold = draft.open(context([asked], draft=0)).propose(BestFirst(12, 3), asked[-1:], 3)
    assert len(untold[0]) > 1  # the same text without knowledge of special tokens


@pytest.mark.parametrize("draft", [NGramDraft(), SuffixDraft()], ids=["ngram", "suffix"])
def test_messages_and_earlier_answers_are_still_proposed(draft):
    """What stands in a message follows its first word again, and an answer may begin as the one before."""
    assert [11, 12] in proposed([*chat((USER, [10, 11, 12])), 10], draft)
    again = proposed(chat((USER, [10, 11]), (ASSISTANT, [20, 21, 22]), (USER, [12])), draft)
    assert [20, 21, 22] in again
    assert [12] not in again


ITS_OWN = "{% if messages[0].role != 'system' %}abcdef{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
ITS_OWN += "{% endfor %}<a>"


@pytest.mark.parametrize("draft", [NGramDraft(), SuffixDraft()], ids=["ngram", "suffix"])
def test_what_a_template_says_by_itself_is_not_proposed(draft):
    """Its system message; the same words of a user are."""
    tokenizer = byte_tokenizer(chat_template=ITS_OWN)

    def continued(draft, prompt):
        ids = [*encode(prompt, tokenizer).only, *tokenized("ab", tokenizer)]
        (tree,) = draft.open(context([ids], draft=0)).propose(Chain(2), ids[-1:], 2)
        return tokenizer.decode(tree.tokens[1:].tolist())

    assert continued(draft, "hello") == "cd"
    bound = draft.attach(None, tokenizer)
    assert tokenizer.decode(bound.template) == "abcdef<user>"
    assert continued(bound, "hello") == ""
    assert continued(bound, "zabcd") == "cd"
    assert continued(bound, [{"role": "system", "content": "zabcd"}, {"role": "user", "content": "hello"}]) == "cd"


def test_a_memory_does_not_keep_what_a_template_says_by_itself():
    memory, draft, tokenizer = Memory(), SuffixDraft(), byte_tokenizer(chat_template=ITS_OWN)
    draft.memory = memory
    bound = draft.attach(SimpleNamespace(vocab_size=VOCAB), tokenizer)
    bound.learn([tokenized(text, tokenizer) for text in ("abcdef<user>hello", "raw")], 0.0)
    assert [tokenizer.decode(text) for text in memory.index.texts(len(memory.index.ids))] == ["hello", "raw"]


def test_the_decoder_tells_drafts_of_special_tokens(target, tokenizer):
    """The caller's drafts are left alone."""
    mine = NGramDraft()
    decoder = SpeculativeDecoder(target, tokenizer, [mine, "suffix"])
    assert tokenizer.all_special_ids
    assert all(draft.special >= {*tokenizer.all_special_ids} for draft in decoder.drafts)
    assert mine.special == frozenset()


def test_a_draft_that_is_not_asked_indexes_nothing():
    """With many rows most look-ups are idle; prompts and texts are read when a tree is asked for."""
    session, rows = NGramDraft().open(context([[1, 2, 3, 1, 2], [7, 8, 7]])), [[1, 2, 3, 1, 2, 3], [7, 8, 7, 8]]
    session.commit([[3], [8]])
    assert not any(len(text.ids) for text in session.texts)
    trees = session.propose(BestFirst(3, 2), ends(rows), 2)
    assert [text.ids.tolist() for text in session.texts] == rows
    assert [*trees] == [NGramDraft().open(context([ids])).propose(BestFirst(3, 2), ids[-1:], 2)[0] for ids in rows]
