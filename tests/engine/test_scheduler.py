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

from specinfer import BestFirst, Sampled, SpeculativeDecoder
from specinfer.attention import TreeCache
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.errors import InputError, NumericalError

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
    assert len(passes) == NEW + 1  # one more reads the prompts
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
    """1,000 in all: requests are added, aborted and waited for at any step."""
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

    for _ in range(250):
        scheduler, asked = made.scheduler(random.choice([1, 2, 3])), []
        left = random.randint(1, 4)
        while left or not scheduler.idle:
            while left and random.random() < 0.6:
                number, temperature, new = random.randrange(4), random.choice([0, 1]), random.randint(1, 5)
                options = {"temperature": temperature, "seed": number, "max_new_tokens": new}
                asked.append((scheduler.add(made.prepare(TEXTS[number], **options)), number, options))
                left -= 1
            if asked and random.random() < 0.1:
                scheduler.abort(random.choice(asked)[0])
            scheduler.step()
        for request, number, options in asked:
            ids, wanted = request.result.token_ids, ids_alone(number, **options)
            assert ids == (wanted if request.finish_reason == "length" else wanted[: len(ids)])
            ends[request.finish_reason] += 1
    assert set(ends) == {"length", "aborted"}
    assert min(ends.values()) > 20


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
    """A model whose logits are not numbers."""

    def fail(module, given, output):
        output.logits.fill_(float("nan"))

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
    with broken(target), pytest.raises(NumericalError) as caught:
        drained(scheduler)
    assert first.error is second.error is caught.value
    assert (first.done, first.finish_reason) == (True, "unfinished")
    with pytest.raises(NumericalError):
        list(steps)
    drained(scheduler)
    assert third.result.token_ids == made.generate(PROMPTS[2], **GREEDY).token_ids
    assert third.error is None


def test_a_function_that_a_step_calls_cannot_take_another(target):
    made = decoder(target)
    scheduler = made.scheduler()
    request = made.prepare(PROMPTS[0], logits_processor=[lambda ids, scores: scheduler.step() and scores], **GREEDY)
    scheduler.add(request)
    with pytest.raises(InputError, match="under way"):
        scheduler.step()


def test_a_request_is_added_once_where_it_belongs(target):
    made = decoder(target)
    request = made.scheduler().add(made.prepare(PROMPTS[0], **GREEDY))
    with pytest.raises(InputError, match="added before"):
        made.scheduler().add(request)
    with pytest.raises(InputError, match="another decoder"):
        decoder(target).scheduler().add(made.prepare(PROMPTS[0], **GREEDY))
    with pytest.raises(InputError, match="max_rows"):
        made.scheduler(0)


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
