"""Requests that come and go while others are decoded: each gets the ids it has alone, and nobody waits for another."""

import gc
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from queue import SimpleQueue
from random import Random
from threading import Event, Thread

import pytest
from conftest import EOS_TEXT, PROMPTS, byte_tokenizer, counted, like, tiny_llama
from schedules import run_at_random
from test_heads import draft_for

from specinfer import Auto, BestFirst, Sampled, SpeculativeDecoder
from specinfer.attention import TreeCache
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.engine.scheduler import LESSON, Scheduler
from specinfer.engine.sessions import CHUNK
from specinfer.engine.store import PrefixStore
from specinfer.errors import InputError, NumericalError, SamplingError

NEW = 8
GREEDY = {"max_new_tokens": NEW, "temperature": 0}
TREE = BestFirst(7, 4)


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def decoder(target, drafts=("ngram",), tree=TREE):
    return SpeculativeDecoder(target, byte_tokenizer(), list(drafts), tree, compile=False)


def drained(scheduler):
    """Take steps until nothing is left; return the tokens that each request emitted."""
    found = {}
    while not scheduler.idle:
        for request, step in scheduler.step():
            found.setdefault(request, []).extend(step.tokens)
    return found


def test_a_request_joins_at_the_next_step_for_which_there_is_room(target):
    """Without drafts a request takes as many steps as it has tokens, so the schedule is known."""
    made = decoder(target, [], None)
    scheduler = made.scheduler(max_rows=2)
    assert scheduler.idle
    first, second, third = (made.prepare(ids, max_new_tokens=new) for ids, new in zip(PROMPTS, (3, 5, 2), strict=False))
    under_way = []
    scheduler.add(first)
    for number in count():
        if number == 1:
            scheduler.add(second)
            scheduler.add(third)
        if not (emitted := scheduler.step()):
            break
        under_way.append([request for request, _ in emitted])
    both = [first, second]
    assert under_way == [[first], both, both, [second, third], [second, third], [second]]
    assert scheduler.idle
    assert [r.finish_reason for r in (first, second, third)] == ["length"] * 3


@pytest.mark.parametrize("tree", ["auto", None, TREE, Sampled((2, 2))], ids=str)
@pytest.mark.parametrize("temperature", [0, 1])
def test_results_are_those_of_each_request_alone(target, tree, temperature):
    made = decoder(target, [like(target), "ngram"] if tree else [], tree)
    asked = {"max_new_tokens": NEW, "temperature": temperature, "seed": 3}
    scheduler = made.scheduler(max_rows=3)
    requests = [scheduler.add(made.prepare(prompt, **asked)) for prompt in PROMPTS]
    found = drained(scheduler)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        alone = made.generate(prompt, **asked)
        result = request.result
        assert found[request] == result.token_ids == alone.token_ids
        assert (result.text, result.finish_reason, result.seed) == (alone.text, alone.finish_reason, alone.seed)
        assert result.made_by == alone.made_by
        assert result.stats.target_passes == len(result.steps)
        decoding = sum(step.seconds.decoding for step in result.steps)
        assert result.stats.seconds.decoding >= decoding > 0


def test_a_request_from_another_thread_joins_those_under_way(target):
    """It is added in the middle of a pass."""
    made = decoder(target, [], None)
    scheduler, inside, added = made.scheduler(), Event(), Event()

    def add():
        inside.wait()
        late.append(scheduler.add(made.prepare(PROMPTS[1], **GREEDY)))
        added.set()

    def pause(*_):
        if not inside.is_set():
            inside.set()
            assert added.wait(20), "adding waits for the step"

    made.generate(PROMPTS[0], max_new_tokens=1)
    late, first = [], scheduler.add(made.prepare(PROMPTS[0], **GREEDY))
    hook = target.register_forward_pre_hook(pause)
    thread = Thread(target=add)
    thread.start()
    try:
        sizes = [len(scheduler.step()) for _ in range(2)]
    finally:
        hook.remove()
        thread.join()
    assert sizes[1] == 2
    drained(scheduler)
    for request, prompt in zip([first, *late], PROMPTS, strict=False):
        assert request.result.token_ids == made.generate(prompt, **GREEDY).token_ids


@pytest.mark.parametrize("when", ["waiting", "in the middle", "in a pass", "at the end", "alone"])
def test_an_aborted_request_leaves_and_others_go_on(target, when):
    made = decoder(target)
    scheduler = made.scheduler(max_rows=1 if when == "waiting" else 3)
    prompts = PROMPTS[:1] if when == "alone" else PROMPTS[:3]
    requests = [scheduler.add(made.prepare(prompt, **GREEDY)) for prompt in prompts]
    victim, others = requests[-1], requests[:-1]
    if when == "at the end":
        drained(scheduler)
    elif when == "in a pass":
        scheduler.step()
        hook = target.register_forward_pre_hook(lambda *_: scheduler.abort(victim))
        scheduler.step()
        hook.remove()
        assert (victim.done, len(victim.steps)) == (True, 2)  # it leaves after the step
    else:
        scheduler.step()
    kept = len(victim.steps)
    scheduler.abort(victim)
    wanted = "length" if when == "at the end" else "aborted"
    assert (victim.done, victim.finish_reason, victim.result.finish_reason) == (True, wanted, wanted)
    drained(scheduler)
    assert len(victim.steps) == kept
    whole = made.generate(prompts[-1], **GREEDY).token_ids
    assert victim.result.token_ids == whole[: len(victim.result.token_ids)]
    assert bool(victim.result.token_ids) == (when != "waiting")
    for request, prompt in zip(others, prompts, strict=False):
        assert request.result.token_ids == made.generate(prompt, **GREEDY).token_ids
        assert request.finish_reason == "length"


def test_who_waits_gets_the_place_of_one_who_was_aborted(target):
    made = decoder(target, [], None)
    scheduler = made.scheduler(max_rows=1)
    first, second = (scheduler.add(made.prepare(prompt, **GREEDY)) for prompt in PROMPTS[:2])
    scheduler.step()
    scheduler.abort(first)
    assert [request for request, _ in scheduler.step()] == [second]
    assert scheduler.active == [second]


def test_streams_that_take_turns_share_passes(target):
    made = decoder(target, [], None)
    alone = [list(made.stream(prompt, raw=True, **GREEDY)) for prompt in ("ab", "hello", "x")]
    scheduler = made.scheduler()
    streams = [made.stream(text, raw=True, scheduler=scheduler, **GREEDY) for text in ("ab", "hello", "x")]
    with counted(target) as passes:
        waiting, found = list(streams), {stream: [] for stream in streams}
        while waiting:
            pieces = {stream: next(stream, None) for stream in waiting}
            waiting = [stream for stream, piece in pieces.items() if piece is not None]
            for stream in waiting:
                found[stream].append(pieces[stream])
    assert list(map("".join, found.values())) == list(map("".join, alone))
    assert [stream.result.text for stream in streams] == list(map("".join, alone))
    assert len(passes) == NEW  # the first one reads the prompts
    assert scheduler.idle


@pytest.mark.parametrize("tree", ["auto", TREE], ids=str)
def test_streams_of_several_threads_share_passes(target, tree):
    made = decoder(target, ["ngram", like(target)], tree)
    asked = [{"temperature": number % 2, "seed": number, "max_new_tokens": 24} for number in range(6)]
    wanted = [made.generate(PROMPTS[number % 4], **options) for number, options in enumerate(asked)]
    scheduler = made.scheduler(max_rows=4)
    streams = [made.stream(PROMPTS[n % 4], scheduler=scheduler, **options) for n, options in enumerate(asked)]
    with counted(target) as passes, ThreadPoolExecutor(len(streams)) as threads:
        texts = list(threads.map("".join, streams))
    assert texts == [result.text for result in wanted]
    assert [stream.result.token_ids for stream in streams] == [result.token_ids for result in wanted]
    assert len(passes) < sum(result.stats.target_passes for result in wanted)
    assert scheduler.idle


def test_a_closed_stream_leaves_the_others(target):
    made = decoder(target)
    scheduler = made.scheduler()
    first, second = (made.stream("ab", raw=True, scheduler=scheduler, **GREEDY) for _ in range(2))
    next(first)
    first.close()
    assert first.result.finish_reason == "aborted"
    assert "".join(second) == made.generate("ab", raw=True, **GREEDY).text
    assert scheduler.idle
    third = made.stream("x", raw=True, scheduler=scheduler, **GREEDY)
    next(third)
    third.close()
    assert scheduler.idle  # the last one releases the caches


def test_a_stream_ends_where_the_text_does(target, tokenizer):
    made = SpeculativeDecoder(target, tokenizer, ["ngram"], TREE, compile=False)
    options = {"max_new_tokens": 40, "temperature": 1, "eos_token_id": EOS_TEXT}
    scheduler = made.scheduler(max_rows=2)
    for seed in range(6):
        text = "".join(made.stream("ab", seed=seed, scheduler=scheduler, **options))
        assert text == made.generate("ab", seed=seed, **options).text


# ---- many schedules ----


@pytest.fixture(scope="module")
def small():
    """A target of one layer in float32."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return tiny_llama(vocab=32, **sizes).float()


TEXTS = [[1, 2, 1, 2], [7], [3, 4, 5, 3, 4, 9, 3], [11, 30]]


@pytest.mark.parametrize("drafts", ["none", "ngram", "model", "sampled"])
def test_random_schedules_give_the_ids_of_each_request_alone(small, drafts):
    """240 in all: requests are added, aborted and waited for at any step."""
    made = {
        "none": lambda: SpeculativeDecoder(small, None, (), None, compile=False),
        "ngram": lambda: SpeculativeDecoder(small, None, ["ngram"], BestFirst(4, 3), compile=False),
        "model": lambda: SpeculativeDecoder(small, None, [like(small).float()], BestFirst(3, 2), compile=False),
        "sampled": lambda: SpeculativeDecoder(small, None, [like(small).float()], Sampled((2,)), compile=False),
    }[drafts]()
    ends, random = Counter(), Random(0)

    @cache
    def ids_alone(number, **options):
        return made.generate(TEXTS[number], **options).token_ids

    for _ in range(60):
        for request, number, options in run_at_random(made.scheduler(random.choice([1, 2, 3])), TEXTS, random, 5):
            ids, wanted = request.result.token_ids, ids_alone(number, **options)
            assert ids == (wanted if request.finish_reason == "length" else wanted[: len(ids)])
            ends[request.finish_reason] += 1
    assert set(ends) == {"length", "aborted"}
    assert min(ends.values()) > 8


def caches():
    """The slots of every cache alive, in order."""
    gc.collect()
    return sorted(each.rows * each.capacity for each in gc.get_objects() if type(each) is TreeCache)


def test_memory_is_flat(target):
    """Over 200 requests, with never less than one under way."""
    made, before = decoder(target, [like(target), "ngram"]), caches()
    scheduler, sizes, requests = made.scheduler(max_rows=3), [], weakref.WeakSet()
    for number in range(200):
        requests.add(scheduler.add(made.prepare(PROMPTS[number % 4], max_new_tokens=3, temperature=0)))
        scheduler.step()
        if number % 40 == 39:
            sizes.append((caches(), len(requests)))
    assert sizes[1:] == sizes[:1] * 4
    assert sizes[0][1] <= 3 + 2
    drained(scheduler)
    assert caches() == before
    assert not list(requests)


def test_a_batch_that_never_ends_does_not_grow(small):
    """Over 1,000 requests that fill the store: what the scheduler and the store hold."""
    heard, sizes = [], []

    class Listening(NGramDraft):
        def attach(self, target, tokenizer):
            return self

        def learn(self, texts, seconds):
            heard.append(len(texts))

    made, store, random = (
        SpeculativeDecoder(small, None, [Listening()], TREE, compile=False),
        PrefixStore(0.02),
        Random(0),
    )
    scheduler, requests, rows = made.scheduler(max_rows=4, store=store), weakref.WeakSet(), weakref.WeakSet()
    for number in range(1000):
        prompt = [random.randrange(32) for _ in range(random.randint(1, 40))]
        request = scheduler.add(made.prepare(prompt, max_new_tokens=2, temperature=0))
        requests.add(request)
        rows.add(request.row)
        del request
        scheduler.step()
        while len(scheduler.active) > 2:
            scheduler.step()
        if number % 200 == 199:
            batch = scheduler._batch
            gc.collect()
            assert len(requests) <= 5 >= len(rows)
            assert len(batch._texts) < LESSON
            assert store.nbytes <= 20_000
            sizes.append((len(batch._batch.notes), len(batch.requests) + len(batch.joining) <= 4))
            assert len([each for each in gc.get_objects() if type(each) is TreeCache]) <= len(store.prefixes) + 2
    assert sizes[1:] == sizes[:1] * 4
    assert sum(heard) >= 1000 - LESSON
    assert set(heard) == {LESSON}


# ---- prompts that are read beside others ----


@pytest.fixture(scope="module")
def roomy():
    """A target with a context for long prompts."""
    return tiny_llama(max_position_embeddings=4096)


@contextmanager
def widths(model):
    """How many tokens each pass reads."""
    found = []
    hook = model.register_forward_pre_hook(
        lambda module, args, given: found.append(given["input_ids"].numel()), with_kwargs=True
    )
    yield found
    hook.remove()


LENGTHY = [Random(0).randrange(2, 250) for _ in range(2000)]


@pytest.mark.parametrize(("drafts", "temperature"), [("none", 1), ("ngram", 0), ("model", 1), ("head", 0)])
def test_a_long_prompt_that_joins_stops_nobody(roomy, drafts, temperature):
    """It is read a chunk a step, and those under way emit in every one; short ones behind it wait their turn."""
    made = decoder(roomy, {"none": [], "ngram": ["ngram"], "model": [like(roomy)], "head": [draft_for(roomy)]}[drafts])
    asked = {"temperature": temperature, "seed": 4, "max_new_tokens": 60}
    alone = [made.generate(ids, **asked).token_ids for ids in (PROMPTS[0], LENGTHY, PROMPTS[2])]
    scheduler = made.scheduler()
    first = scheduler.add(made.prepare(PROMPTS[0], **asked))
    scheduler.step()
    late = [scheduler.add(made.prepare(ids, **asked)) for ids in (LENGTHY, PROMPTS[2])]
    beside = 0
    with widths(roomy) as read:
        while not late[0].steps:
            assert [request for request, _ in scheduler.step()][:1] == [first]
            beside += 1
    assert beside == -(-(len(LENGTHY) - 1) // CHUNK)
    assert max(read) <= CHUNK + 2 * (1 + TREE.max_nodes)
    assert len(late[1].steps) == 0
    drained(scheduler)
    assert [request.result.token_ids for request in (first, *late)] == alone


def test_short_prompts_join_together(roomy):
    """As many as make up a chunk are read in one pass."""
    made = decoder(roomy, [draft_for(roomy)])
    scheduler = made.scheduler()
    first = scheduler.add(made.prepare(PROMPTS[0], max_new_tokens=40, temperature=0))
    scheduler.step()
    prompts = [LENGTHY[number : number + CHUNK // 3] for number in range(5)]
    others = [scheduler.add(made.prepare(ids, **GREEDY)) for ids in prompts]
    assert {request for request, _ in scheduler.step()} == {first, *others[:3]}
    assert {request for request, _ in scheduler.step()} == {first, *others}
    drained(scheduler)
    for request, ids in zip(others, prompts, strict=True):
        assert request.result.token_ids == made.generate(ids, **GREEDY).token_ids


def test_a_prompt_is_read_at_once_if_nobody_is_under_way(roomy):
    """Also the rest of one that was begun beside others."""
    made = decoder(roomy, [], None)
    scheduler = made.scheduler()
    first = scheduler.add(made.prepare(PROMPTS[0], max_new_tokens=3, temperature=0))
    scheduler.step()
    late = scheduler.add(made.prepare(LENGTHY, **GREEDY))
    assert [[request for request, _ in scheduler.step()] for _ in range(3)] == [[first], [first], [late]]
    drained(scheduler)
    assert late.result.token_ids == made.generate(LENGTHY, **GREEDY).token_ids


def test_policies_are_told_who_is_about_to_join(roomy):
    """As long as their prompts are read; the first chunk of one is read, and two wait."""
    told = []

    class Told(Auto):
        """Keeps the numbers of rows, and of those that come."""

        def observe(self, trees, *others, coming, **more):
            told.append((len(trees), coming))
            super().observe(trees, *others, coming=coming, **more)

    made = decoder(roomy, [draft_for(roomy)], tree=Told())
    scheduler = made.scheduler()
    first = scheduler.add(made.prepare(PROMPTS[0], max_new_tokens=30, temperature=0))
    scheduler.step()
    for prompt in (LENGTHY, PROMPTS[1], PROMPTS[2]):
        scheduler.add(made.prepare(prompt, **GREEDY))
    while not first.done:
        scheduler.step()
    steps = len(LENGTHY) // CHUNK
    assert told[: steps + 2] == [(1, 0), *[(1, 3)] * steps, (2, 2)]
    drained(scheduler)


@pytest.mark.parametrize("then", ["another", "nobody"])
def test_a_request_that_is_aborted_while_its_prompt_is_read(roomy, then):
    """What was read of it is kept, and others go on."""
    made, store = decoder(roomy, [draft_for(roomy)]), PrefixStore()
    scheduler = made.scheduler(store=store)
    first = scheduler.add(made.prepare(PROMPTS[0], max_new_tokens=40, temperature=0))
    scheduler.step()
    late = scheduler.add(made.prepare(LENGTHY, **GREEDY))
    for _ in range(3):
        scheduler.step()
    if then == "another":
        again = scheduler.add(made.prepare(LENGTHY, **GREEDY))
    scheduler.abort(late)
    assert (late.done, late.finish_reason, late.steps) == (True, "aborted", [])
    drained(scheduler)
    assert first.result.token_ids == made.generate(PROMPTS[0], max_new_tokens=40, temperature=0).token_ids
    if then == "another":
        assert again.result.token_ids == made.generate(LENGTHY, **GREEDY).token_ids
        assert again.result.stats.cached_tokens == 3 * CHUNK
    else:
        assert 3 * CHUNK in [len(prefix.ids) for prefix in store.prefixes]


# ---- sources that take their time ----


def test_a_source_of_prompts_that_blocks_does_not_block_rows_under_way(target):
    made, asked, prompts = decoder(target), [], SimpleQueue()

    def source():
        while (prompt := prompts.get(timeout=20)) is not None:
            asked.append(prompt)
            yield prompt

    found = made.generate_many(source(), max_rows=3, **GREEDY)
    for number, prompt in enumerate(PROMPTS):  # each comes when the one before is done
        prompts.put(prompt)
        done = next(found)
        assert (done.number, done.result.token_ids) == (number, made.generate(prompt, **GREEDY).token_ids)
        assert asked == PROMPTS[: number + 1]
    prompts.put(None)
    assert list(found) == []


def test_an_error_of_a_source_is_the_callers(target):
    def source():
        yield PROMPTS[0]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(decoder(target).generate_many(source(), **GREEDY))


# ---- what cannot be decoded together, and what fails ----


def test_contrastive_search_waits_until_it_is_alone(target):
    made = decoder(target)
    search = {"penalty_alpha": 0.6, "top_k": 3, "max_new_tokens": NEW}
    order = [GREEDY, search, search, {**GREEDY, "temperature": 1, "seed": 5}]
    scheduler = made.scheduler()
    requests = [scheduler.add(made.prepare(ids, **options)) for ids, options in zip(PROMPTS, order, strict=True)]
    together = set()
    while emitted := scheduler.step():
        together.add(tuple(requests.index(request) for request, _ in emitted))
    assert together <= {(0,), (1, 2), (1,), (2,), (3,)}
    for request, ids, options in zip(requests, PROMPTS, order, strict=True):
        assert request.result.token_ids == made.generate(ids, **options).token_ids


def test_sampled_trees_are_of_one_distribution(target):
    made = decoder(target, [like(target)], Sampled((2, 2)))
    order = [{"temperature": t, "max_new_tokens": 4, "seed": 1} for t in (1, 1, 0.5, 0)]
    scheduler = made.scheduler()
    requests = [scheduler.add(made.prepare(ids, **options)) for ids, options in zip(PROMPTS, order, strict=True)]
    firsts = {request for request, _ in scheduler.step()}
    assert firsts == set(requests[:2])
    drained(scheduler)
    for request, ids, options in zip(requests, PROMPTS, order, strict=True):
        assert request.result.token_ids == made.generate(ids, **options).token_ids


@contextmanager
def broken(model):
    """A model whose passes fail."""

    def fail(module, given, output):
        raise RuntimeError("no pass")

    hook = model.register_forward_hook(fail)
    yield
    hook.remove()


def test_a_step_that_fails_ends_those_under_way_and_no_others(target):
    made = decoder(target)
    made.generate(PROMPTS[0], max_new_tokens=1)
    scheduler = made.scheduler(max_rows=2)
    first, second, third = (scheduler.add(made.prepare(prompt, **GREEDY)) for prompt in PROMPTS[:3])
    scheduler.step()
    steps = scheduler.stream(second)
    next(steps)
    with broken(target), pytest.raises(RuntimeError, match="no pass") as caught:
        drained(scheduler)
    assert first.error is second.error is caught.value
    assert (first.done, first.finish_reason) == (True, "unfinished")
    with pytest.raises(RuntimeError, match="no pass"):
        list(steps)
    drained(scheduler)
    assert third.result.token_ids == made.generate(PROMPTS[2], **GREEDY).token_ids
    assert third.error is None


def nothing_is_possible(ids, scores):
    """A processor that leaves nothing after a while."""
    return scores - float("inf") if ids.shape[1] > len(PROMPTS[1]) + 2 else scores


def raising(*given):
    """A processor or a criterion that fails after a while."""
    if given[0].shape[1] > len(PROMPTS[1]) + 2:
        raise KeyError("no such token")
    return given[1] if len(given) > 1 and given[1] is not None else False


FAILING = {
    "nothing left": ({"logits_processor": [nothing_is_possible]}, NumericalError),
    "processor": ({"logits_processor": [raising]}, KeyError),
    "criterion": ({"stopping_criteria": [raising]}, KeyError),
}


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("what", FAILING)
def test_what_fails_in_one_row_ends_it_and_no_other(target, what, search):
    """The others get the ids that they have alone; the one that failed keeps what it emitted before."""
    made, store = decoder(target, ["ngram"] if search else [like(target), "ngram"]), PrefixStore()
    options, error = FAILING[what]
    asked = {"max_new_tokens": NEW} | ({"penalty_alpha": 0.6, "top_k": 3} if search else {"temperature": 1, "seed": 2})
    scheduler = made.scheduler(store=store)
    requests = [
        scheduler.add(made.prepare(ids, **asked, **(options if number == 1 else {})))
        for number, ids in enumerate([*PROMPTS, [*range(40, 70)]])
    ]
    found, last = {}, []
    while not scheduler.idle:
        emitted = scheduler.step()
        last += [request for request, step in emitted if not step.tokens]
        found |= dict(emitted)
    assert last == [requests[1]]  # it comes once more, when it fails
    failed = requests.pop(1)
    assert (failed.done, failed.finish_reason, type(failed.error)) == (True, "unfinished", error)
    whole = made.generate(PROMPTS[1], **asked).token_ids
    ids = failed.result.token_ids
    assert len(ids) < NEW
    assert ids == whole[: len(ids)]
    for request, prompt in zip(requests, [PROMPTS[0], *PROMPTS[2:], [*range(40, 70)]], strict=True):
        assert request.error is None
        assert request.result.token_ids == made.generate(prompt, **asked).token_ids
    with pytest.raises(error):
        list(scheduler.stream(failed))


@pytest.mark.parametrize("what", FAILING)
def test_a_call_raises_what_fails_in_one_of_its_rows(target, what):
    made, (options, error), before = decoder(target), FAILING[what], caches()
    with pytest.raises(error) as caught:
        made.generate([PROMPTS[1]] * 2, **GREEDY, **options)
    if error is NumericalError:
        assert [result.finish_reason for result in caught.value.partial] == ["unfinished"] * 2
        assert all(result.token_ids for result in caught.value.partial)
    with pytest.raises(error):
        list(made.stream(PROMPTS[1], **GREEDY, **options))
    del caught  # its frames hold all that was under way
    assert caches() == before


def test_a_row_that_fails_is_not_kept(target):
    """Its keys and values may be no numbers."""
    made, store = decoder(target), PrefixStore()
    scheduler = made.scheduler(store=store)
    prompt = [*range(40, 70)]
    failed = scheduler.add(made.prepare(prompt, logits_processor=[lambda ids, scores: scores * float("nan")], **GREEDY))
    drained(scheduler)
    assert isinstance(failed.error, NumericalError)
    assert not list(store.prefixes)


def test_a_function_that_a_step_calls_cannot_take_another(target):
    made = decoder(target)
    scheduler = made.scheduler()
    request = made.prepare(PROMPTS[0], logits_processor=[lambda ids, scores: scheduler.step() and scores], **GREEDY)
    scheduler.add(request)
    scheduler.step()
    assert isinstance(request.error, InputError)
    assert "under way" in str(request.error)


def test_a_request_is_added_once_where_it_belongs(target):
    made = decoder(target)
    request = made.scheduler().add(made.prepare(PROMPTS[0], **GREEDY))
    with pytest.raises(InputError, match="added before"):
        made.scheduler().add(request)
    with pytest.raises(InputError, match="another decoder"):
        decoder(target).scheduler().add(made.prepare(PROMPTS[0], **GREEDY))
    with pytest.raises(InputError, match="max_rows"):
        made.scheduler(0)
    search = made.prepare(PROMPTS[0], penalty_alpha=0.5, top_k=3, max_new_tokens=NEW)
    sampled = Scheduler(made, policy=Sampled((2,)))
    with pytest.raises(SamplingError, match="not ranked"):
        sampled.add(search)
    assert sampled.idle
    scheduler = made.scheduler()
    scheduler.add(search)  # where it may
    assert len(drained(scheduler)[search]) == NEW


def test_drafts_learn_when_a_batch_has_ended(target):
    heard = []

    class Listening(NGramDraft):
        def attach(self, target, tokenizer):
            return self

        def learn(self, texts, seconds):
            heard.append(sorted(texts))

    made = decoder(target, [Listening()])
    scheduler = made.scheduler(max_rows=2)
    for number in (1, 2):
        requests = [scheduler.add(made.prepare(prompt, **GREEDY)) for prompt in PROMPTS]
        drained(scheduler)
        assert len(heard) == number
        assert heard[-1] == sorted([*r.result.prompt_ids, *r.result.token_ids] for r in requests)


def test_prepare_returns_a_request_or_a_list(target):
    made = decoder(target)
    assert made.prepare([1, 2], **GREEDY).row.ids == [1, 2]
    assert [request.row.seed for request in made.prepare([[1], [2]], seed=[4, 7], **GREEDY)] == [4, 7]
    assert len(made.prepare([1], num_return_sequences=3, max_new_tokens=2, temperature=1)) == 3
    with pytest.raises(InputError, match="vocabulary"):
        made.prepare([9999], **GREEDY)
