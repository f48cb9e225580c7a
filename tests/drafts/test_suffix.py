"""The suffix draft and its memory: counts against brute force, texts against no speculation, files, bytes, threads."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
from conftest import PROMPTS, VOCAB, byte_tokenizer, plain
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from strategies import PROPERTY
from test_draft import context

from specinfer import Auto, BestFirst, Expansion, Memory, Sampled, SpeculativeDecoder
from specinfer.adaptive.experience import Seconds
from specinfer.drafts.lookup.memory import LEAST_BYTES
from specinfer.drafts.lookup.suffix import SuffixDraft, common
from specinfer.drafts.lookup.text_index import LENGTHS, RECENT, SPAN, Passages, TextIndex, successors
from specinfer.errors import InputError, TokenizerMismatch
from specinfer.evaluation.traces import record, replay

DEEP = BestFirst(64, 32, 0.05)
SYMBOLS = st.lists(st.integers(0, 3), min_size=1, max_size=12)
REPEATING = st.lists(SYMBOLS, min_size=1, max_size=3).flatmap(
    lambda parts: st.lists(st.sampled_from(parts), min_size=1, max_size=12)
)
TEXTS = REPEATING.map(lambda parts: [token for part in parts for token in part])
STORY = list(range(100, 140))


def indexed(*texts, max_context=64):
    index = TextIndex([n for n in LENGTHS if n <= max_context], max_context)
    for text in texts:
        index.begin()
        index.extend(text)
    return index


def newest(texts, context, n, upto):
    """The newest occurrences of the last n tokens of a context: (length of the match, what followed)."""
    found = []
    for text in texts:
        for end in range(n, len(text)):
            if text[end - n : end] == context[-n:]:
                length = n
                while length < upto and length < end and text[end - length - 1 : end] == context[-length - 1 :]:
                    length += 1
                found.append((min(length, len(context)), text[end]))
    return found[-RECENT:]


def brute(texts, context, max_context, power=0.5):
    """PPM-C, context by context."""
    bounds = [*(n for n in LENGTHS if n <= max_context), max_context + 1]
    found = {
        shortest: [each for some in texts for each in newest(some, context, shortest, longer - 1)]
        for shortest, longer in pairwise(bounds)
    }
    distribution, left = Counter(), 1.0
    for n in range(min(max_context, len(context)), 0, -1):
        counts = Counter()
        for length, token in found[max(shortest for shortest in found if shortest <= n)]:
            if length >= n:
                counts[token] += 1
        if counts:
            total = sum(counts.values())
            escape = (len(counts) / (total + len(counts))) ** power
            for token, count in counts.items():
                distribution[token] += left * (1 - escape) * count / total
            left *= escape
    return dict(distribution)


@PROPERTY
@given(TEXTS, st.lists(TEXTS, max_size=3), st.lists(st.integers(0, 3), max_size=2), st.sampled_from([1, 3, 9, 64]))
def test_counts_equal_brute_force(ids, remembered, path, max_context):
    """The row's text and a memory, any path; matches of any length, blended one context at a time."""
    ending = [*ids, *path][-max_context:]
    found = successors(tuple(ending), [indexed(ids, max_context=max_context), indexed(*remembered)], 0.5)
    wanted = brute([[ids], remembered], ending, max_context)
    tokens = {token for token, p in wanted.items() if p > 1e-5}  # contexts that get less are not asked
    assert tokens <= found.keys() <= wanted.keys()
    assert found == pytest.approx({token: wanted[token] for token in found}, abs=2e-6)
    assert sum(found.values()) <= 1 + 1e-12


def test_one_long_match_is_nearly_sure_and_a_short_one_is_not():
    """Every context of a match adds to it: 1 - 2 ** (-n / 2) after n tokens that were seen once."""
    index = indexed([*STORY, 1, 2, *STORY[:20]])
    for n in (1, 2, 8, 20):
        distribution = successors(tuple(STORY[20 - n : 20]), [index], 0.5)
        assert distribution == pytest.approx({STORY[20]: 1 - 2.0 ** (-n / 2)}, abs=2e-6)


def test_texts_of_an_index_do_not_run_into_each_other():
    index = indexed([1, 2], [3, 4])
    assert successors((2,), [index]) == {}
    assert successors((2, 3), [index]) == {4: 0.5}


def taught():
    """`auto` where a level of the draft is known to cost next to nothing: before that it asks for one."""
    auto = Auto().begin(1, False)
    auto.costs.plain[1], auto.costs.levels[0] = Seconds(), Seconds()
    for _ in range(3):
        auto.costs.plain[1].add(1e-2)
        auto.costs.levels[0].add(1e-5)
    return auto


@pytest.mark.parametrize("policy", [DEEP, BestFirst(31, 31), taught()], ids=str)
def test_a_long_match_is_drafted_deep(policy):
    """Thirty tokens below a match of ten."""
    session = SuffixDraft().open(context([[*STORY, 1, 2, *STORY[:10]]]))
    (tree,) = session.propose(policy, STORY[9:10], 40)
    chain = max((list(tree.path(node)) for node in range(len(tree))), key=len)
    assert chain == [*STORY[10:], 1, 2][: len(chain)]
    assert len(chain) >= 30


def filled(*values):
    """A form: fields of a key of four tokens, a value of any length, and an end of two."""
    fields = zip((10, 20, 30), values, strict=True)
    return [token for key, value in fields for token in (1, key, key + 1, 2, *value, 3, 4)]


def test_a_form_goes_on_after_a_value_that_was_never_seen():
    """A memory of two forms: below the end of a new value, of any length, stands the way to the next value."""
    draft, memory = SuffixDraft(), Memory()
    draft.memory = memory
    memory.learn([filled([100], [101, 102], [103]), filled([110, 111], [112], [113])])
    session, form = draft.open(context([[9]])), filled([120, 121], [122, 123, 124], [125])
    for start, end, key in ((0, 6, 20), (6, 15, 30)):
        session.commit([form[start:end]])
        (tree,) = session.propose(BestFirst(24, 8, 0.05), form[end - 1 : end], 8)
        assert [3, 4, 1, key, key + 1, 2] in [list(tree.path(node)) for node in range(len(tree))]


def test_passages_are_those_that_the_text_runs_along():
    """The newest places with the longest matches, no two equal; a place that is passed, or is old, is forgotten."""
    text, earlier = indexed([9]), indexed(STORY, STORY, [*STORY[:7], 7, 8])
    passages = Passages()
    passages.extend(STORY[:6], text, [text, earlier])
    assert passages.texts == [STORY[6 : 6 + SPAN], [STORY[6], 7, 8]]
    assert passages.successors(STORY[6]) == {STORY[7]: 0.25, 7: 0.25}
    passages.extend([STORY[6]], text, [text, earlier])
    assert passages.texts == [STORY[7 : 7 + SPAN], [7, 8]]
    passages.extend([5] * (SPAN + 1), text, [earlier])
    assert passages.texts == []
    assert passages.successors(5) == {}


def test_tokens_that_many_passages_share_resume_them():
    """First those of most passages, then those that come sooner."""
    text, earlier = indexed([9]), indexed(filled([100], [101], [102]), filled([110, 111], [112], [113]))
    passages = Passages()
    passages.extend([1, 10, 11, 2], text, [earlier])
    expected = passages.successors(120)
    assert sorted(expected, key=expected.get, reverse=True)[:2] == [3, 4]
    assert expected[3] == pytest.approx(0.5 * 2 / 3)
    assert expected[4] == pytest.approx(0.5 * 1 / 3 * 2 / 3)


def test_passages_are_believed_as_often_as_they_were_right():
    """Half at first; then those that were right once of two times, and those that were wrong."""
    text, earlier = indexed([9]), indexed(STORY)
    passages = Passages()
    passages.extend(STORY[:5], text, [earlier])
    assert passages.successors(STORY[6]) == {STORY[7]: 1 / 2}
    passages.extend([STORY[7]], text, [earlier])  # a gap: it was a token with which passages may be resumed
    assert passages.successors(0)[STORY[5]] == pytest.approx(2 / 3 / 2)
    passages.extend([STORY[8]], text, [earlier])
    assert passages.successors(STORY[6]) == {STORY[7]: 2 / 3}
    passages.extend([STORY[20]], text, [earlier])
    assert passages.successors(STORY[6]) == {STORY[7]: 2 / 4}


def test_rows_of_a_call_read_each_other_if_there_is_a_memory():
    """Not without one."""
    for memory in (None, Memory()):
        draft = SuffixDraft()
        draft.memory = memory
        trees = draft.open(context([STORY, STORY[:3]])).propose(DEEP, [STORY[-1], STORY[2]], 8)
        assert [len(tree) > 8 for tree in trees] == [False, memory is not None]


@pytest.mark.parametrize("max_context", [0, -3])
def test_contexts_have_at_least_one_token(max_context):
    with pytest.raises(InputError, match="max_context"):
        SuffixDraft(max_context)


# ---- texts ----

RULES = {"greedy": {"do_sample": False}, "coupled": {"temperature": 0.8, "seed": 3}}


@pytest.fixture(scope="module")
def texts(target):
    """The ids of no speculation."""
    alone = SpeculativeDecoder(target, drafts=(), tree=None)
    return {rule: [alone.generate(p, max_new_tokens=12, **RULES[rule]).token_ids for p in PROMPTS] for rule in RULES}


@pytest.mark.parametrize("tree", ["auto", DEEP, Expansion((2, 1))], ids=str)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_text_is_that_of_no_speculation(target, near, texts, tree, merged, rule):
    """Greedy and coupled, in a ragged batch and alone; for the second call a memory knows the text."""
    drafts = [near, "suffix", "ngram"] if merged else ["suffix"]
    for memory in (None, Memory()):
        decoder = SpeculativeDecoder(target, drafts=drafts, tree=tree, memory=memory)
        results = decoder.generate(PROMPTS, max_new_tokens=12, **RULES[rule])
        assert [result.token_ids for result in results] == texts[rule]
    assert decoder.generate(PROMPTS[0], max_new_tokens=12, **RULES[rule]).token_ids == texts[rule][0]


@pytest.mark.parametrize("replacement", [False, True])
def test_sampled_trees_draw_from_what_they_report(replacement):
    """Own text and memory: PPM's successors, normalised over the target's vocabulary."""
    memory, row = Memory(), [1, 2, 3, 1, 2, 4, 1]
    memory.learn([[4, 1, 2, 9]])
    draft = SuffixDraft()
    draft.memory = memory
    (tree,) = draft.open(context([row])).propose(Sampled((3, 1), replacement), row[-1:], 2)
    assert len(tree) > 1
    for (node, _), distribution in tree.distributions.items():
        wanted = np.zeros(VOCAB)
        for token, p in brute([[row], [[4, 1, 2, 9]]], [*row, *tree.path(node)], 64).items():
            wanted[token] = p
        assert np.allclose(distribution, wanted / wanted.sum(), atol=1e-6)


def test_a_recording_is_replayed_with_the_steps_of_a_real_run(target):
    decoder = SpeculativeDecoder(target, byte_tokenizer(), ["suffix"], DEEP)
    trace = record(decoder, PROMPTS[:2], max_new_tokens=16, temperature=0.0, nodes=16, depth=8, top=4, draws=2)
    made = replay(trace, BestFirst(16, 8))
    decoder = SpeculativeDecoder(target, byte_tokenizer(), ["suffix"], BestFirst(16, 8))
    assert made.how == "exact"
    assert made.steps.tolist() == [
        len(decoder.generate(p, max_new_tokens=16, do_sample=False).steps) for p in PROMPTS[:2]
    ]


# ---- memory ----


def steps(decoder, prompt=PROMPTS[0]):
    """How many passes a text takes, which is the same text every time."""
    result = decoder.generate(prompt, max_new_tokens=24, do_sample=False)
    assert result.token_ids == plain(decoder.target.model, prompt, 24)
    return len(result.steps)


def test_nothing_crosses_calls_unless_a_memory_is_given(target):
    """With one, a text that was written before takes a few passes; without, as many as the first time."""
    without = SpeculativeDecoder(target, drafts=["suffix"], tree=DEEP)
    assert steps(without) == steps(without) > 4
    decoder = SpeculativeDecoder(target, drafts=["suffix"], tree=DEEP, memory=Memory())
    assert steps(decoder) == steps(without)
    assert steps(decoder) <= 2
    assert steps(without) > 4


def test_drafts_of_the_caller_are_left_alone(target):
    """A draft that serves two decoders has the memory of one of them only there."""
    draft = SuffixDraft(16)
    decoder = SpeculativeDecoder(target, drafts=[draft], memory=Memory())
    assert draft.memory is None
    assert decoder.drafts[0].memory is decoder.memory
    assert decoder.drafts[0].max_context == 16


def test_auto_drafts_read_the_memory(target):
    assert [draft.name for draft in SpeculativeDecoder(target, memory=Memory()).drafts] == ["recycling", "suffix"]


def test_streams_and_threads_share_a_memory(target):
    """Two streams in turns, then eight calls at once: every text is the target's."""
    decoder = SpeculativeDecoder(target, byte_tokenizer(), ["suffix"], DEEP, memory=Memory(LEAST_BYTES))
    wanted = [plain(target, prompt, 24) for prompt in PROMPTS]
    runs = [decoder.open(prompt, max_new_tokens=24, do_sample=False) for prompt in PROMPTS[:2]]
    under_way = [iter(run) for run in runs]
    while under_way:
        under_way = [steps for steps in under_way if next(steps, None) is not None]
    assert [run.results()[0].token_ids for run in runs] == wanted[:2]
    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(decoder.generate, p, max_new_tokens=24, do_sample=False) for p in [*PROMPTS, *PROMPTS]]
        assert [job.result().token_ids for job in jobs] == [*wanted, *wanted]
    assert decoder.memory.index.bytes <= LEAST_BYTES
    assert deepcopy(decoder.memory).index.ids == decoder.memory.index.ids


def test_the_oldest_texts_are_forgotten():
    """Bytes stay below the bound, the newest text stays whole, and what is left is indexed as if it were all."""
    memory, rng = Memory(LEAST_BYTES), np.random.default_rng(0)
    texts = [rng.integers(0, 1000, 30).tolist() for _ in range(40)]
    for text in texts:
        memory.learn([text])
        assert memory.index.bytes <= LEAST_BYTES
    left = list(memory.index.texts(len(memory.index.ids)))
    assert left[1:] == texts[-len(left) + 1 :]
    assert texts[-len(left)][-len(left[0]) :] == left[0]
    assert 2 < len(left) < 40
    assert memory.index.before == indexed(*left).before
    memory.learn([list(range(5000))])
    assert memory.index.bytes <= LEAST_BYTES
    assert memory.index.ids[-1] == 4999


def test_ctrl_c_while_a_memory_learns_leaves_it_whole():
    class Special:
        stops = True

        def __contains__(self, token):
            if self.stops and token == STORY[20]:
                raise KeyboardInterrupt
            return False

    memory = Memory()
    memory.index.special = Special()
    with pytest.raises(KeyboardInterrupt):
        memory.learn([STORY])
    memory.index.special.stops = False
    memory.learn([STORY])
    wanted = indexed(STORY[:21], STORY)
    assert memory.index.ids == wanted.ids
    assert {len(before) for before in memory.index.before} == {len(wanted.ids)}
    assert memory.index.occurrences(tuple(STORY[:-1]), 0) == wanted.occurrences(tuple(STORY[:-1]), 0)


def test_a_memory_is_saved_and_loaded(target, tmp_path):
    """The file's texts draft as those of the memory that was saved; a path is enough."""
    decoder = SpeculativeDecoder(target, byte_tokenizer(), ["suffix"], DEEP, memory=Memory())
    steps(decoder)
    decoder.memory.save(tmp_path / "memory")
    loaded = SpeculativeDecoder(target, byte_tokenizer(), ["suffix"], DEEP, memory=tmp_path / "memory")
    assert list(loaded.memory.index.ids) == list(decoder.memory.index.ids)
    assert loaded.memory.index.last == decoder.memory.index.last
    assert steps(loaded) <= 2


def test_several_texts_are_saved_apart(tmp_path):
    memory = Memory()
    memory.learn([[1, 2], [3], [4, 5, 6]])
    memory.save(tmp_path / "memory")
    assert list(Memory.load(tmp_path / "memory").index.texts(99)) == [[1, 2], [3], [4, 5, 6]]


def test_bad_memories_are_refused_in_one_line(target, tmp_path):
    """Truncated, of other tokens, something else, missing; no draft that reads it; no room."""
    decoder = SpeculativeDecoder(target, byte_tokenizer(), ["suffix"], memory=Memory())
    steps(decoder)
    path, other, cut = tmp_path / "memory", tmp_path / "other", tmp_path / "cut"
    decoder.memory.save(path)
    whole = path.read_bytes()
    save_file({"ids": np.zeros(3)}, other)
    for size in (0, 7, 40, len(whole) - 4):
        cut.write_bytes(whole[:size])
        refused(InputError, "incomplete", lambda: Memory.load(cut))
    refused(InputError, "not a memory", lambda: Memory.load(other))
    refused(InputError, "there is no memory", lambda: Memory.load(tmp_path / "missing"))
    more = byte_tokenizer()
    more.add_tokens(["more"])
    for tokens in (more, None):
        refused(TokenizerMismatch, "tokens", lambda t=tokens: SpeculativeDecoder(target, t, ["suffix"], memory=path))
    refused(InputError, "suffix", lambda: SpeculativeDecoder(target, None, ["ngram"], memory=Memory()))
    refused(InputError, "suffix", lambda: SpeculativeDecoder(target, tree=None, memory=Memory()))
    refused(InputError, "not a memory", lambda: SpeculativeDecoder(target, None, ["suffix"], memory=True))
    for size in (0, 1000, True, 1e9):
        refused(InputError, "max_bytes", lambda s=size: Memory(s))


def refused(error, words, call):
    with pytest.raises(error, match=words) as found:
        call()
    assert "\n" not in str(found.value)


def test_what_texts_have_in_common():
    assert common([[1, 2, 3], [1, 2, 4], [1, 2]]) == [1, 2]
    assert common([[1], [2]]) == common([[], [1]]) == []
    assert common([[3, 4]]) == [3, 4]
