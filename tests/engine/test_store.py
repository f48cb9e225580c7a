"""Prompts that begin alike: the target reads what they share once, and every text is what it would be alone."""

from collections import Counter
from contextlib import contextmanager
from random import Random

import pytest
import torch
from conftest import like, plain, tiny_llama
from schedules import run_at_random
from test_heads import draft_for
from test_stateful import build
from transformers import MistralConfig, MistralForCausalLM

from specinfer import BestFirst, Sampled, SpeculativeDecoder
from specinfer.attention import TreeCache, TreeModel, resumed
from specinfer.attention import cache as caches
from specinfer.common.tensors import concat
from specinfer.drafts.head import HeadDraft
from specinfer.drafts.language_model import ModelDraft
from specinfer.drafts.lookup.suffix import LookupDraft
from specinfer.engine import sessions
from specinfer.engine.prefixes import LEAST, Prefix, cache_of
from specinfer.engine.sessions import CHUNK
from specinfer.engine.store import SHARE, STEPS, PrefixStore, Text
from specinfer.errors import CacheError, InputError

LONG = [*range(60, 60 + 3 * LEAST)]
SHORTER = LONG[: 2 * LEAST]
ALIKE = [[*LONG, 5, 9], [*LONG, 40], LONG, [*LONG, 7, 7, 7], [*SHORTER, 1, 2], [*LONG, 250], [4, 4], [*SHORTER, 3]]
OTHERS = [[number, *LONG] for number in range(5)]


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def windowed():
    """A target whose layers attend to fewer tokens than the prompts share."""
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": LEAST, "initializer_range": 0.25}
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)).double().eval()


def texts(found):
    return [done.result.token_ids for done in sorted(found)]


class Read:
    """Counts the tokens that a model reads."""

    def __init__(self, model):
        self.hook = model.register_forward_hook(self.count, with_kwargs=True)
        self.tokens = 0

    def count(self, module, args, kwargs, output):
        """See one pass."""
        self.tokens += kwargs["input_ids"].numel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hook.remove()


@contextmanager
def reading(decoder, model=None):
    """Count what the target reads, or another model; the check of a model with a hook is over."""
    with Read(model or decoder.target.model) as read:
        decoder.generate([1], max_new_tokens=1)
        read.tokens = 0
        yield read


@pytest.mark.parametrize(("rows", "temperature"), [(1, 0), (2, 1), (3, 0), (8, 1)])
def test_texts_are_those_alone(target, rows, temperature):
    made = SpeculativeDecoder(target, None, [draft_for(target), like(target)], BestFirst(7, 4), compile=False)
    options = {"max_new_tokens": 8, "temperature": temperature, "seed": 3}
    found = made.generate_many(ALIKE, max_rows=rows, **options)
    assert texts(found) == [made.generate(prompt, **options).token_ids for prompt in ALIKE]


def test_windows_that_are_shorter_than_what_is_shared():
    made = SpeculativeDecoder(windowed(), None, ["ngram"], BestFirst(7, 4), compile=False)
    options = {"max_new_tokens": 8, "temperature": 0}
    for rows in (1, 3):
        found = made.generate_many(ALIKE, max_rows=rows, **options)
        assert texts(found) == [made.generate(prompt, **options).token_ids for prompt in ALIKE]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_what_prompts_share_is_read_once(target, rows):
    """By the rows that come first together, or by the first one."""
    made = SpeculativeDecoder(target, None, [], None, compile=False)
    prompts = [[*LONG, number] for number in range(12)]
    options = {"max_new_tokens": 1, "temperature": 0}
    with Read(target) as read:
        list(made.generate_many(prompts, max_rows=rows, **options))
        read.tokens = 0
        list(made.generate_many(prompts, max_rows=rows, **options))
    assert read.tokens == len(LONG) + len(prompts)


def test_a_batch_shares_too(target):
    made = SpeculativeDecoder(target, None, [], None, compile=False)
    prompts = [[*LONG, number] for number in range(4)]
    with Read(target) as read:
        made.generate(prompts, max_new_tokens=1, temperature=0)
        read.tokens = 0
        made.generate(prompts, max_new_tokens=1, temperature=0)
    assert read.tokens == len(LONG) + len(prompts)


def test_prompts_that_do_not_begin_alike_cost_no_pass_more(target):
    """Nor do those that share a few tokens."""
    for prompts in (OTHERS, [[*LONG[: LEAST - 1], number, *LONG] for number in range(5)]):
        made = SpeculativeDecoder(target, None, [], None, compile=False)
        with Read(target) as read:
            list(made.generate_many(prompts, max_rows=2, max_new_tokens=1, temperature=0))
            read.tokens = 0
            list(made.generate_many(prompts, max_rows=2, max_new_tokens=1, temperature=0))
        assert read.tokens == sum(map(len, prompts))


def read(store, model, prompts, *sizes):
    """Read prompts into a session of a store; return it, and the states of what was read."""
    texts = [Text([*prompt, 0]) for prompt in prompts]
    session = store.open(model, texts, 4, 200, *sizes)
    begun, lengths = store.begin(session), session.cache.lengths
    new = session.prefill([prompt[length:] for prompt, length in zip(prompts, lengths, strict=True)])
    return session, [concat([states, read]) for (states, _), read in zip(begun, new, strict=True)]


def test_states_are_those_of_whole_prompts(target):
    """The hidden states that heads read, and the keys and values that follow."""
    model, store = TreeModel(target), PrefixStore()
    with resumed(model):
        for prompts in (ALIKE[:2], ALIKE[2:3], ALIKE[3:5], [LONG, SHORTER], OTHERS[:1], ALIKE[:1]):
            session, found = read(store, model, prompts, (1, 2))
            plain = model.session(len(prompts), 4, 200, (1, 2))
            for states, wanted in zip(found, plain.prefill(prompts), strict=True):
                torch.testing.assert_close(states, wanted, rtol=1e-9, atol=1e-9)
            assert session.cache.lengths == plain.cache.lengths == [*map(len, prompts)]
            for row, length in enumerate(session.cache.lengths):
                for mine, theirs in zip(session.cache.layers, plain.cache.layers, strict=True):
                    for pair in zip(mine.buffers, theirs.buffers, strict=True):
                        torch.testing.assert_close(*(each[row, :, :length] for each in pair), rtol=1e-9, atol=1e-9)
            session.cache.check_integrity()
            store.release(session)


def test_rows_that_hold_something_do_not_begin_anew():
    empty, other = TreeCache(2, 4), TreeCache(1, 4)
    for cache, length in ((empty, 1), (other, 0)):
        with pytest.raises(CacheError, match="cannot begin"):
            cache.begin(0, other, 0, length)
    other.lengths = [3]
    empty.lengths = [1, 0]
    with pytest.raises(CacheError, match="cannot begin"):
        empty.begin(0, other, 0, 2)


# ---- a store that outlives batches ----


def drained(scheduler):
    """Take steps until nothing is left."""
    while not scheduler.idle:
        scheduler.step()


def decoder(target, drafts, tree=BestFirst(7, 4)):  # noqa: B008
    made = {"none": [], "head": [draft_for(target)], "model": [like(target)], "both": ["ngram", draft_for(target)]}
    return SpeculativeDecoder(target, None, made[drafts], tree if made[drafts] else None, compile=False)


def assert_read_as_alone(made, prefix):
    """What drafts have read of a prefix is what they read of the same text without a store."""
    alone = PrefixStore()
    scheduler = made.scheduler(store=alone)
    scheduler.add(made.prepare([*prefix.ids.tolist(), 1], max_new_tokens=4, temperature=0))
    drained(scheduler)
    (wanted,) = alone.prefixes
    for cached in prefix.caches[1:]:
        theirs = cache_of(cached.owner, wanted.caches)
        length = cached.common(theirs.ids)
        assert length >= len(cached.ids) - 1  # of a text that goes on, the last token of another tokenizer may differ
        for pair in zip(cached.cache.layers, theirs.cache.layers, strict=True):
            for mine, other in zip(*(layer.buffers for layer in pair), strict=True):
                torch.testing.assert_close(mine[0, :, :length], other[0, :, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drafts", ["none", "model", "both"])
def test_random_schedules_give_the_ids_of_each_request_alone(target, drafts):
    """Ragged prompts that begin alike are added and aborted at any step, over many batches of one store."""
    made, store, random = decoder(target, drafts), PrefixStore(1), Random(5)
    texts = [[*LONG[: random.randrange(60)], *(random.randrange(250) for _ in range(3))] for _ in range(6)]
    ends, cached, alone = Counter(), 0, {}
    for _ in range(24):
        for request, number, options in run_at_random(
            made.scheduler(random.choice([1, 2, 3]), store), texts, random, 8
        ):
            case = number, *options.values()
            if case not in alone:
                alone[case] = made.generate(texts[number], **options).token_ids
            ids = request.result.token_ids
            assert ids == (alone[case] if request.finish_reason == "length" else alone[case][: len(ids)])
            ends[request.finish_reason] += 1
            cached += request.result.stats.cached_tokens > 0
    assert min(ends["length"], ends["aborted"]) > 5
    assert cached > 20
    for prefix in store.prefixes:
        read = [len(cached.ids) for cached in prefix.caches]
        for cached in prefix.caches:
            cached.cache.check_integrity()
            assert cached.cache.lengths == [len(cached.ids)]
        assert read[0] == len(prefix.ids) >= max(read)
        if drafts == "both":  # what the head has not read, and the last token that it has
            states = sum(map(len, prefix.states))
            assert prefix.first + states == len(prefix.ids)
            assert 0 < states <= len(prefix.ids) - (read[1] - 1 if len(read) > 1 else 0)
        else:
            assert not prefix.states
    read = [prefix for prefix in store.prefixes if len(prefix.caches) > 1]
    assert bool(read) == (drafts != "none")
    for prefix in read[-8:]:
        assert_read_as_alone(made, prefix)


@pytest.mark.parametrize("drafts", ["head", "model"])
def test_sampled_trees_are_those_without_a_store(target, drafts):
    """Their draws depend on what the drafts say, bit by bit almost."""
    made, store = decoder(target, drafts, Sampled((2, 2, 1))), PrefixStore()
    history = [*LONG]
    for turn in range(4):
        options = {"max_new_tokens": 9, "temperature": 1, "seed": turn}
        scheduler = made.scheduler(store=store)
        request = scheduler.add(made.prepare(history, **options))
        drained(scheduler)
        wanted = made.generate(history, **options)
        assert request.result.token_ids == wanted.token_ids
        assert request.result.accept_lengths == wanted.accept_lengths
        assert (request.result.stats.cached_tokens > 0) == (turn > 0)
        history = [*history, *wanted.token_ids, 7, 9]


def test_contrastive_search_finds_what_it_has_read(target):
    """With hidden states that others do not keep, so they share with nobody else."""
    made, store = decoder(target, "model"), PrefixStore()
    search = {"penalty_alpha": 0.6, "top_k": 3, "max_new_tokens": 6}
    scheduler = made.scheduler(store=store)
    found = []
    for options in (search, search, {"max_new_tokens": 6, "temperature": 0}):
        found.append(scheduler.add(made.prepare([*LONG, 3], **options)))
        drained(scheduler)
        assert found[-1].result.token_ids == made.generate([*LONG, 3], **options).token_ids
    assert [request.result.stats.cached_tokens for request in found] == [0, len(LONG), 0]


def test_decoders_share_what_they_can(target):
    """Those without drafts and with language models the target's caches; a head needs its own, or states."""
    store, cached, drafts = PrefixStore(), [], {"none": [], "head": [draft_for(target)], "model": [like(target)]}
    for kind in ("none", "model", "none", "head", "head", "model"):
        made = SpeculativeDecoder(target, None, drafts[kind], BestFirst(7, 4), compile=False)
        options = {"max_new_tokens": 6, "temperature": 0}
        scheduler = made.scheduler(store=store)
        request = scheduler.add(made.prepare([*LONG, 3], **options))
        drained(scheduler)
        assert request.result.token_ids == made.generate([*LONG, 3], **options).token_ids
        cached.append(request.result.stats.cached_tokens)
    assert cached == [0, len(LONG), len(LONG), 0, len(LONG) - 1, len(LONG)]
    assert sorted(len(prefix.caches) for prefix in store.prefixes) == [1, 2, 2]


def test_a_draft_reads_what_is_new(target):
    """Of a prompt that a row under way begins with, and of one that is kept."""
    made, store = decoder(target, "model"), PrefixStore()
    scheduler = made.scheduler(store=store)

    def tokens(*more):
        with reading(made, made.drafts[0].model.model) as read:
            scheduler.add(made.prepare([*LONG, *more], max_new_tokens=6, temperature=0))
            scheduler.step()
        return read.tokens

    assert tokens(3) > len(LONG)
    assert tokens(9, 4) < len(LONG)  # two rows, padded, and 4 levels
    drained(scheduler)
    assert tokens(9, 4, 5) < len(LONG)


def test_what_is_under_way_is_found(target):
    """A request that joins another one with the same beginning reads its own end."""
    made = decoder(target, "head")
    scheduler = made.scheduler()
    first = scheduler.add(made.prepare([*LONG, 3], max_new_tokens=12, temperature=0))
    scheduler.step()
    late = scheduler.add(made.prepare([*LONG, 9, 4], max_new_tokens=6, temperature=0))
    with Read(target) as read:
        made.generate([1], max_new_tokens=1)
        read.tokens = 0
        scheduler.step()
    assert read.tokens <= 1 + 2 * (1 + 7)  # the 9, and two trees
    drained(scheduler)
    assert [request.result.stats.cached_tokens for request in (first, late)] == [0, len(LONG)]
    assert late.result.token_ids == made.generate([*LONG, 9, 4], max_new_tokens=6, temperature=0).token_ids


@pytest.mark.parametrize("drafts", ["head", "model"])
def test_what_drafts_read_outlives_the_row_that_it_is_copied_from(target, drafts):
    """A long prompt is read in chunks, and the row with the same beginning leaves meanwhile."""
    made, store = decoder(target, drafts), PrefixStore()
    scheduler, options = made.scheduler(store=store), {"temperature": 0}
    ends = [(OTHERS[1], 2), ([*LONG, 3], 2)]
    first = [scheduler.add(made.prepare(prompt, max_new_tokens=new, **options)) for prompt, new in ends]
    scheduler.step()
    lengthy = [*LONG, *(number % 250 for number in range(CHUNK + 60))]
    late = scheduler.add(made.prepare(lengthy, max_new_tokens=9, **options))
    while not all(request.done for request in first):
        scheduler.step()
    assert not late.steps
    drained(scheduler)
    assert late.result.stats.cached_tokens == len(LONG)
    assert late.result.token_ids == made.generate(lengthy, max_new_tokens=9, **options).token_ids
    *_, latest = store.prefixes
    assert len(latest.caches) == 2
    assert_read_as_alone(made, latest)


def test_rows_that_share_say_so(target):
    """The first of a batch has read what the others copy; in `generate_many` nothing is read twice."""
    made = decoder(target, "none")
    prompts = [[*LONG, number] for number in range(3)]
    found = made.generate(prompts, max_new_tokens=2, temperature=0)
    assert [result.stats.cached_tokens for result in found] == [0, len(LONG), len(LONG)]
    found = [done.result for done in sorted(made.generate_many(prompts, max_rows=1, max_new_tokens=2, temperature=0))]
    assert [result.stats.cached_tokens for result in found] == [0, len(LONG), len(LONG)]
    assert found[1].stats.to_dict()["cached_tokens"] == len(LONG)


def test_texts_of_another_salt_share_nothing(target):
    made, store = decoder(target, "head"), PrefixStore()
    scheduler = made.scheduler(store=store)
    cached = []
    for salts in (["a", "a", "b", None], ["b", "a", None, "c"]):
        requests = [scheduler.add(made.prepare([*LONG, 3], max_new_tokens=3, cache_salt=salt)) for salt in salts]
        drained(scheduler)
        cached.append([request.result.stats.cached_tokens for request in requests])
    assert cached == [[0, len(LONG), 0, 0], [len(LONG) - 1] * 3 + [0]]
    with pytest.raises(InputError, match="cache_salt"):
        made.prepare([1], cache_salt=3)


def test_a_store_of_no_size_shares_nothing(target):
    made, store = decoder(target, "head"), PrefixStore(0)
    scheduler = made.scheduler(store=store)
    for _ in range(2):
        requests = [scheduler.add(made.prepare([*LONG, 3], max_new_tokens=3)) for _ in range(2)]
        drained(scheduler)
        assert [request.result.stats.cached_tokens for request in requests] == [0, 0]
    assert not list(store.prefixes)
    for size in (-1, "much", float("nan"), True):
        with pytest.raises(InputError, match="megabytes"):
            PrefixStore(size)


def test_one_call_copies_nothing_that_nobody_would_find(target):
    """Rows of a call are kept while others wait."""
    made, copied = decoder(target, "none"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefix, "copy", lambda prefix, copy=Prefix.copy: copied.append(len(prefix.ids)) or copy(prefix))
        made.generate([[*LONG, 3], [*LONG, 4]], max_new_tokens=3, temperature=0)
        assert copied == []
        made.generate([[*LONG, 3], [*LONG, 4]], max_new_tokens=3, temperature=0, max_rows=1)
    assert copied == [len(LONG) + 3]


def kept(store):
    return [prefix.ids.tolist() for prefix in store.prefixes]


def test_the_least_recently_used_is_dropped(target):
    """By bytes: a token takes 2 layers * keys and values * 2 heads * 8 numbers of 8 bytes."""
    made, token = decoder(target, "none"), 2 * 2 * 2 * 8 * 8
    prompts = [[number, *LONG] for number in range(4)]
    size = len(prompts[0]) * token  # the root is read in the only step
    store = PrefixStore(3 * size / 10**6)
    scheduler = made.scheduler(store=store)

    def ask(number):
        scheduler.add(made.prepare(prompts[number], max_new_tokens=1, temperature=0))
        drained(scheduler)

    for number in (0, 1, 2):
        ask(number)
    assert (kept(store), store.nbytes) == (prompts[:3], 3 * size)
    ask(0)  # is used
    assert kept(store) == [prompts[1], prompts[2], prompts[0]]
    ask(3)
    assert kept(store) == [prompts[2], prompts[0], prompts[3]]
    store.megabytes = 1.5 * size / 10**6
    ask(1)
    assert kept(store) == [prompts[1]]
    store.megabytes = 0.5 * size / 10**6
    ask(2)
    assert kept(store) == []
    store.clear()
    assert store.nbytes == 0


@pytest.mark.parametrize("drafts", ["head", "model", "both"])
def test_bytes_of_drafts_count(target, drafts):
    """Caches of both, and states that the head has not read."""
    made, sizes = decoder(target, drafts), []
    for size in (1.0, 0.0):
        store = PrefixStore(1) if size else PrefixStore((sizes[0] - 1) / 10**6)
        scheduler = made.scheduler(store=store)
        scheduler.add(made.prepare(LONG, max_new_tokens=6, temperature=0))
        drained(scheduler)
        sizes.append(store.nbytes)
        for prefix in store.prefixes:
            caches = [cached.cache.nbytes for cached in prefix.caches]
            assert len(caches) == 2
            assert min(caches) > 0
            states = sum(states.nbytes for states in prefix.states)
            assert store.nbytes == sum(caches) + states
            if drafts == "model":
                assert not states
            else:
                assert states < 12 * len(made.aux_layers) * 32 * 8  # of the last steps only
    assert sizes[1] == 0


def test_states_that_were_read_are_dropped_while_a_text_goes_on(target):
    made = decoder(target, "head")
    scheduler = made.scheduler()
    scheduler.add(made.prepare(LONG, max_new_tokens=150, temperature=0))
    held = []
    while not scheduler.idle:
        scheduler.step()
        if scheduler.active:
            session = scheduler._batch._sessions.target
            held.append(sum(len(row.states) for row in session.rows) + len(session.steps))
    assert STEPS - 1 in held
    assert max(held) <= STEPS


@pytest.mark.parametrize("drafts", ["head", "model", "both"])
def test_drafts_that_are_told_late_propose_what_they_would_have(target, drafts, monkeypatch):
    """After steps in which nobody asked them, some of them the last ones of a row, or the first ones of another; and
    they hold no states unread.
    """

    class Seldom(BestFirst):
        @property
        def idle(self):
            return len(steps) % 9 < 7

    found = []
    for waits in (True, False):
        for kind in (HeadDraft, ModelDraft, LookupDraft):
            monkeypatch.setattr(kind, "may_wait", waits)
        made, steps, trees, late = decoder(target, drafts, Seldom(7, 4)), [], [], 0
        scheduler = made.scheduler()
        asked = [
            made.prepare(prompt, max_new_tokens=new, temperature=0)
            for prompt, new in zip(OTHERS, (12, 40, 33, 30, 20), strict=True)
        ]
        while asked or not scheduler.idle:
            for _ in range(min(len(asked), (len(steps) % 3 == 0) + 2 * (not steps))):
                scheduler.add(asked.pop(0))
            steps.append(scheduler.step())
            trees += [str(step.tree.tokens.tolist()) for _, step in steps[-1]]
            sessions = scheduler._batch._sessions if scheduler.active else None
            for draft in sessions.drafts if sessions else ():
                late += len(draft.untold) + len(draft.late)
                held = [new for _, states in draft.untold for new in states if new is not None]
                assert draft.draft.aux_layers or not held
        found.append(trees)
        assert waits == (late > 0)
    assert found[0] == found[1]
    assert any("," in tree for tree in found[0])


@pytest.mark.parametrize("drafts", ["head", "model", "both"])
def test_texts_that_no_draft_has_read_are_begun_with(target, drafts):
    """One began as another, of which a draft has read more, and went on alone for longer than states are held."""

    class Choosing(BestFirst):
        idle = False

    def run(prompt, store, idle=False):
        Choosing.idle, scheduler = idle, made.scheduler(store=store)
        request = scheduler.add(made.prepare(prompt, max_new_tokens=STEPS + 9, temperature=0))
        trees = [str(step.tree.tokens.tolist()) for step in scheduler.stream(request)]
        return request.row.ids, trees, request.row.text.cached

    made, store = decoder(target, drafts, Choosing(7, 4)), PrefixStore()
    run([*LONG, 7, 7, 3, 9, 12, 13], store)
    ids, _, cached = run([*LONG, 40, 2], store, idle=True)
    assert cached >= len(LONG) - 1
    *found, cached = run([*ids[:-1], 77, 5], store)
    assert cached >= len(ids) - 2
    assert found == [*run([*ids[:-1], 77, 5], PrefixStore())][:2]


def test_without_a_size_a_share_of_the_free_memory_is_taken(target, monkeypatch):
    made, store = decoder(target, "head"), PrefixStore()
    scheduler = made.scheduler(store=store)
    monkeypatch.setattr("specinfer.engine.store.free_bytes", lambda device: 3e6)
    for number in range(30):
        scheduler.add(made.prepare([number, *LONG], max_new_tokens=1, temperature=0))
        drained(scheduler)
        assert store.nbytes <= SHARE * (store.nbytes + 3e6)
    assert 1 < len(store.prefixes) < 30
    monkeypatch.setattr("specinfer.engine.store.free_bytes", lambda device: float("inf"))
    for number in range(30):
        scheduler.add(made.prepare([number, *LONG], max_new_tokens=1, temperature=0))
        drained(scheduler)
    assert len(store.prefixes) == 30


def test_a_text_takes_the_place_of_its_own_beginnings(target):
    made, store = decoder(target, "none"), PrefixStore()
    scheduler = made.scheduler(store=store)
    for prompt in (SHORTER, LONG, [*SHORTER, 3], SHORTER, OTHERS[1]):
        scheduler.add(made.prepare(prompt, max_new_tokens=1, temperature=0))
        drained(scheduler)
    assert kept(store) == [LONG, [*SHORTER, 3], OTHERS[1]] or kept(store) == [[*SHORTER, 3], LONG, OTHERS[1]]


@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_what_ctrl_c_in_a_growing_cache_leaves_is_what_was_read(target, monkeypatch, copies):
    """Each growth copies the keys, then the values."""
    monkeypatch.setattr(sessions, "FIRST_TOKENS", 4)
    made = decoder(target, "none")
    scheduler, left = made.scheduler(store=PrefixStore()), [copies]

    def copied(*given):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return copy_rows(*given)

    request = scheduler.add(made.prepare(LONG, max_new_tokens=60, temperature=0))
    copy_rows = caches._copy_rows
    monkeypatch.setattr(caches, "_copy_rows", copied)
    with pytest.raises(KeyboardInterrupt):
        drained(scheduler)
    monkeypatch.setattr(caches, "_copy_rows", copy_rows)
    ids = [*request.row.ids]
    again = scheduler.add(made.prepare(ids, max_new_tokens=8, temperature=0))
    drained(scheduler)
    assert again.cached_tokens == len(ids) - 1
    assert again.result.token_ids == plain(target, ids, 8)


def test_what_ctrl_c_leaves_while_rows_move_up_is_of_no_other_row(target, monkeypatch):
    made, keep = decoder(target, "none"), TreeCache.keep
    scheduler = made.scheduler(store=PrefixStore())
    short = scheduler.add(made.prepare(LONG, max_new_tokens=2, temperature=0))
    scheduler.add(made.prepare([9, *LONG, *LONG], max_new_tokens=20, temperature=0))

    def kept_and_stopped(self, paths):
        keep(self, paths)
        if None in paths:
            raise KeyboardInterrupt

    monkeypatch.setattr(TreeCache, "keep", kept_and_stopped)
    with pytest.raises(KeyboardInterrupt):
        drained(scheduler)
    monkeypatch.setattr(TreeCache, "keep", keep)
    ids = [*short.row.ids, 3]
    again = scheduler.add(made.prepare(ids, max_new_tokens=8, temperature=0))
    drained(scheduler)
    assert again.cached_tokens == len(ids) - 2
    assert again.result.token_ids == plain(target, ids, 8)


def test_what_was_read_under_autocast_is_found_under_autocast():
    made = decoder(tiny_llama().float(), "none")
    store = PrefixStore()

    def cached_tokens():
        scheduler = made.scheduler(store=store)
        request = scheduler.add(made.prepare(LONG, max_new_tokens=2, temperature=0))
        drained(scheduler)
        return request.cached_tokens

    for found in (0, len(LONG) - 1):
        with torch.autocast("cpu", torch.bfloat16):
            assert cached_tokens() == found
        assert cached_tokens() == found


def test_a_model_that_keeps_states_reads_everything():
    made, store = SpeculativeDecoder(build("lfm2"), None, ["suffix"], compile=False), PrefixStore()
    scheduler = made.scheduler(store=store)
    for _ in range(2):
        request = scheduler.add(made.prepare([*range(5, 35)], max_new_tokens=4, temperature=0))
        drained(scheduler)
        assert request.result.stats.cached_tokens == 0
        assert any("reads every prompt whole" in note for note in request.result.stats.notes)
    assert not list(store.prefixes)
    scheduler = made.scheduler(store=PrefixStore(0))  # which nobody expects to find something in
    request = scheduler.add(made.prepare([*range(5, 35)], max_new_tokens=4, temperature=0))
    drained(scheduler)
    assert not any("reads every prompt whole" in note for note in request.result.stats.notes)


def test_scores_of_prompts_that_begin_alike(target):
    made = decoder(target, "none")
    prompts = [[*LONG, number] for number in range(6)]
    with Read(target) as read:
        found = made.score(prompts, [[5, 6]] * 6, max_rows=2)
        read.tokens = 0
        assert made.score(prompts, [[5, 6]] * 6, max_rows=2) == found
    assert read.tokens == len(LONG) + 6 * 2
    for prompt, score in zip(prompts, found, strict=True):
        alone = made.score(prompt, [5, 6])
        assert score.log_probabilities == pytest.approx(alone.log_probabilities, rel=1e-9)
