"""Rows that join a running batch as others end: each is what it would be alone, whoever its companions are."""

import gc
import weakref
from itertools import count, islice
from math import inf
from random import Random

import pytest
import torch
from conftest import EOS_TEXT, PROMPTS, like, tiny_llama
from test_heads import draft_for

from specinfer import BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder
from specinfer.attention import TreeCache, TreeModel, resumed
from specinfer.attention.check import toy_tree
from specinfer.common.tensors import size_bucket
from specinfer.drafts.lookup.ngram import NGramDraft
from specinfer.drafts.lookup.suffix import SuffixDraft
from specinfer.engine.requests import Request
from specinfer.engine.sessions import Openings, Sessions
from specinfer.errors import CacheError, InputError, NumericalError, SamplingError

MANY = [*PROMPTS, [9, 9, 4], [200, 1] * 9, [40], [77, 5, 9, 17, 5]]
BUDGETS = [7, 12, 3, 9, 1, 10, 8, 5]
TREE = BestFirst(7, 4)
DRAFTS = {
    "ngram": lambda target: ["ngram"],
    "suffix": lambda target: [SuffixDraft()],
    "recycling": lambda target: ["recycling"],
    "lookahead": lambda target: ["lookahead"],
    "model": lambda target: [like(target)],
    "head": lambda target: [draft_for(target)],
    "merged": lambda target: [like(target), draft_for(target), "ngram"],
}
LEARN_FROM_OTHERS = {"recycling"}  # a table that all rows fill: their trees depend on companions


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


def decoder(target, drafts=("ngram",), tree=TREE, **options):
    return SpeculativeDecoder(target, None, list(drafts), tree, compile=False, **options)


def own(prompts=MANY, **options):
    """Prompts with options of their own."""
    rows = zip(prompts, BUDGETS, count(10), strict=False)
    return [{"prompt": prompt, "max_new_tokens": new, "seed": seed, **options} for prompt, new, seed in rows]


def taken(found):
    """Results in the order of the prompts."""
    done = sorted(found)
    assert [each.number for each in done] == [*range(len(done))]
    assert [each.error for each in done] == [None] * len(done)
    return [each.result for each in done]


def trees_alike(made, temperature):
    """Run rows that join; return how many trees were compared with those that a row grows alone, ids always are.

    Two rows run at a time, or three if they are sampled.  The end of a text makes its last trees lower, so these are
    not compared.
    """
    compared = 0
    prompts = [{**prompt, "max_new_tokens": new + 6} for prompt, new in zip(own(), BUDGETS, strict=True)]
    every = [made.generate(**prompt, temperature=temperature) for prompt in prompts]
    found = taken(made.generate_many(prompts, max_rows=2 + bool(temperature), temperature=temperature))
    for prompt, alone, result in zip(prompts, every, found, strict=True):
        assert result.token_ids == alone.token_ids
        left = prompt["max_new_tokens"]
        for step, wanted in zip(result.steps, alone.steps, strict=False):
            if left <= TREE.max_depth + 1:
                break
            alike = step.tree.tokens.tolist() == wanted.tree.tokens.tolist()
            assert alike or made.drafts[0].name in LEARN_FROM_OTHERS
            compared += alike and len(step.tree) > 1
            left -= len(step.tokens)
    return compared


@pytest.mark.parametrize(("kind", "temperature"), [
    ("ngram", 0), ("suffix", 1), ("lookahead", 0), ("merged", 1),
    *((kind, temperature) for kind in ("recycling", "model", "head") for temperature in (0, 1)),
])  # fmt: skip
def test_rows_that_join_are_what_they_are_alone(target, kind, temperature):
    """Ids, and the trees that drafts grew."""
    made = decoder(target, DRAFTS[kind](target), BestFirst(80, 9) if kind == "lookahead" else TREE)
    assert trees_alike(made, temperature) > 3 or kind in LEARN_FROM_OTHERS


@pytest.mark.parametrize("tree", ["auto", None, Chain(3), Expansion((2, 1)), Sampled((2, 2))], ids=str)
def test_any_tree(target, tree):
    made = decoder(target, [like(target)], tree)
    wanted = [made.generate(**prompt, temperature=0).token_ids for prompt in own()]
    assert [result.token_ids for result in taken(made.generate_many(own(), max_rows=3, temperature=0))] == wanted


def test_greedy_and_sampled_rows_join_each_other(target):
    prompts = [{**prompt, "temperature": number % 2} for number, prompt in enumerate(own())]
    made = decoder(target, [draft_for(target), "ngram"])
    for order in (prompts, prompts[1:]):
        found = taken(made.generate_many(order, max_rows=2))
        assert [row.token_ids for row in found] == [made.generate(**prompt).token_ids for prompt in order]


def test_a_long_list_is_decoded_a_few_rows_at_a_time(target):
    made = decoder(target)
    options = {"max_new_tokens": BUDGETS, "temperature": 0}
    widths = []
    hook = target.register_forward_hook(lambda module, given, output: widths.append(len(output.logits)))
    try:
        found = made.generate(MANY, max_rows=3, **options)
    finally:
        hook.remove()
    assert max(widths) == 3
    assert [row.token_ids for row in found] == [row.token_ids for row in made.generate(MANY, **options)]
    with pytest.raises(InputError, match="max_rows=0"):
        made.generate(MANY, max_rows=0)


def test_rows_leave_as_they_end_and_the_next_joins_at_once(target):
    """Without drafts a row takes as many steps as it has tokens, so the schedule is known."""
    made = decoder(target, [], None)
    order = [done.number for done in made.generate_many(own(temperature=0), max_rows=2)]
    ends, clock = [0, 0], []
    for number, new in enumerate(BUDGETS):
        place = ends.index(min(ends))
        ends[place] += new
        clock.append((ends[place], number))
    assert order == [number for _, number in sorted(clock)]


def test_prompts_are_asked_for_as_they_are_needed_and_rows_are_forgotten(target):
    """Prompts without end; nothing of a row that ended is kept."""
    made, asked, rows = decoder(target), [], weakref.WeakSet()
    make = made._one_of_many

    def prompts():
        for number in count():
            asked.append(number)
            yield MANY[number % len(MANY)]

    def watched(*given, **more):
        rows.add(row := make(*given, **more))
        return row

    made._one_of_many = watched
    found = made.generate_many(prompts(), max_rows=3, max_new_tokens=4, temperature=0)
    assert asked == []
    for done, _ in zip(found, range(30), strict=False):
        assert len(asked) <= 30 + 3
        del done
        gc.collect()
        assert sum(isinstance(row, Request) for row in rows) <= 3 + 3
    assert len(asked) >= 30
    found.close()
    gc.collect()
    assert not list(rows)


def test_a_bad_prompt_is_reported_in_its_place_and_the_others_go_on(target):
    made = decoder(target)
    bad = {1: [5] * 300, 2: [], 4: [VOCABULARY], 6: {"prompt": [1], "max_tokens": 3}, 7: [[1, 2], [3]], 9: "text"}
    prompts = [bad.get(number, [number + 1, 2]) for number in range(11)]
    found = {done.number: done for done in made.generate_many(iter(prompts), max_rows=2, max_new_tokens=3)}
    assert sorted(found) == [*range(11)]
    assert {number for number, done in found.items() if done.error} == set(bad)
    assert all((done.result is None) == (number in bad) for number, done in found.items())
    for number, words in {1: "exceed", 2: "empty", 4: "vocabulary", 6: "max_tokens", 7: "list", 9: "tokenizer"}.items():
        assert words in str(found[number].error)
    (only,) = made.generate_many([[]])
    assert isinstance(only.error, InputError)
    assert list(made.generate_many([])) == []


VOCABULARY = 1 << 20


def test_what_is_wrong_with_all_prompts_is_said_at_once(target):
    made = decoder(target)
    for options, error in (
        ({"max_tokens": 3}, SamplingError),
        ({"max_new_tokens": 1000}, InputError),
        ({"seed": [1, 2]}, InputError),
        ({"max_rows": 0}, InputError),
        ({"keep_stop_string": 2}, InputError),
        ({"stop_strings": "a"}, SamplingError),
    ):
        with pytest.raises(error):
            made.generate_many(MANY, **options)
    for prompts in ("text", {"prompt": [1]}, 7):
        with pytest.raises(InputError, match="not several prompts"):
            made.generate_many(prompts)


def test_sampled_trees_of_different_distributions_are_those_of_each_prompt_alone(target):
    """Rows of other distributions wait for the end of a batch, in a ragged batch and of many prompts."""
    made, tops, options = (
        decoder(target, [like(target)], Sampled((2,))),
        [0.5, 0.9, 0.5],
        {"max_new_tokens": 6, "seed": 2},
    )
    alone = [made.generate(ids, top_p=top, **options).token_ids for ids, top in zip(MANY, tops, strict=False)]
    together = made.generate(MANY[:3], top_p=tops, **options)
    assert [result.token_ids for result in together] == alone
    prompts = [{"prompt": ids, "top_p": top} for ids, top in zip(MANY, tops, strict=False)]
    found = {done.number: done.result.token_ids for done in made.generate_many(prompts, **options)}
    assert found == dict(enumerate(alone))


def test_texts_and_stop_strings_are_those_of_generate(target, tokenizer):
    made = SpeculativeDecoder(target, tokenizer, ["ngram"], TREE, compile=False)
    texts = ["ab", "hello", "x", "hello hello"]
    options = {"max_new_tokens": 12, "temperature": 0, "eos_token_id": EOS_TEXT}
    first = made.generate("ab", **options).text
    options["stop_strings"] = [first[2:4]]
    for keep in (True, False):
        found = taken(made.generate_many(texts, max_rows=2, keep_stop_string=keep, **options))
        wanted = [made.generate(text, keep_stop_string=keep, **options) for text in texts]
        assert [(row.text, row.finish_reason) for row in found] == [(row.text, row.finish_reason) for row in wanted]


def test_stats_of_a_row_are_its_own(target):
    made = decoder(target, [like(target)])
    found = taken(made.generate_many(own(temperature=0), max_rows=2))
    for result, new in zip(found, BUDGETS, strict=True):
        assert result.stats.new_tokens == len(result.token_ids) == new
        assert result.stats.target_passes == len(result.steps)
    for result in found[2:]:  # those of the first two begin with the opening of sessions
        assert result.stats.seconds.decoding == pytest.approx(sum(step.seconds.decoding for step in result.steps))
        assert result.stats.seconds.prefill > 0
    passes = [result.stats.draft_passes for result in found]
    assert max(passes) < sum(passes) / 2  # those of others' steps are not counted


def test_numbers_that_are_none_end_the_run_and_keep_what_was_done(target):
    made = decoder(target)
    broken = False

    def fail(module, given, output):
        if broken:
            output.logits.fill_(float("nan"))

    hook = target.register_forward_hook(fail)
    found = made.generate_many(own(temperature=0), max_rows=2)
    try:
        assert next(found).result
        broken = True
        with pytest.raises(NumericalError) as caught:
            list(found)
    finally:
        hook.remove()
    assert len(caught.value.partial) == 2


def test_drafts_learn_from_all_rows_at_the_end(target):
    heard = []

    class Listening(NGramDraft):
        def attach(self, target, tokenizer):
            return self

        def learn(self, texts, seconds):
            heard.append(texts)

    made = decoder(target, [Listening()])
    found = taken(made.generate_many(own(temperature=0), max_rows=3))
    assert sorted(heard[0]) == sorted([*row.prompt_ids, *row.token_ids] for row in found)


@pytest.mark.parametrize("kind", ["model", "head"])
def test_drafts_at_work_read_newcomers_alone(target, kind):
    """A pass over all rows would be as wide as the newest prompt for each of them."""
    made, widths = decoder(target, DRAFTS[kind](target)), []
    read = made.drafts[0].model.model.register_forward_pre_hook(
        lambda module, args, given: widths.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    prompts = [[5, 9], [7, 3, 1], [9] * 60, [8] * 70]
    budgets = [4, 20, 20, 20]
    asked = [{"prompt": prompt, "max_new_tokens": new} for prompt, new in zip(prompts, budgets, strict=True)]
    found = taken(made.generate_many(asked, max_rows=2, temperature=0))
    read.remove()
    assert [len(result.token_ids) for result in found] == budgets
    wide = [rows for rows, width in widths if width > 40]
    assert len(wide) == 2
    assert set(wide) == {1}


class Waiting(BestFirst):
    """A policy that asks nobody in the first steps."""

    left = 0  # how many

    @property
    def idle(self):
        """Whether that is so in the next step."""
        return Waiting.left > 0

    def fit(self, trees):
        """Count the step."""
        Waiting.left -= 1
        return super().fit(trees)


@pytest.mark.parametrize("kind", ["model", "head", "merged"])
def test_drafts_that_nobody_asks_read_nothing(target, kind, monkeypatch):
    """Neither prompts nor texts; and the target takes the passes that it takes without drafts."""
    monkeypatch.setattr(Waiting, "left", inf)
    passes = []
    counted = target.register_forward_pre_hook(lambda *_: passes.append(None))
    found, counts = [], []
    for made in (decoder(target, DRAFTS[kind](target), Waiting(7, 4)), decoder(target, [], None)):
        for draft in made.drafts:
            draft.open = draft.open if draft.model is None else None
        passes.clear()
        found.append([result.token_ids for result in taken(made.generate_many(own(temperature=0), max_rows=3))])
        counts.append(len(passes))
    counted.remove()
    assert found[0] == found[1]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_reading_a_prompt_is_prefill_whenever_it_is_read(target, steps, monkeypatch):
    """So that an adaptive policy judges a draft by what follows."""
    made, now = decoder(target, DRAFTS["head"](target), Waiting(7, 4)), [0.0]
    (draft,) = made.drafts
    opening = draft.open

    def slow(context):
        now[0] += 100.0
        return opening(context)

    draft.open = slow
    monkeypatch.setattr("specinfer.engine.sessions.perf_counter", lambda: now[0])
    monkeypatch.setattr(Waiting, "left", steps)
    stats = made.generate(PROMPTS[0], max_new_tokens=12, temperature=0).stats
    assert (round(stats.seconds.prefill), round(stats.drafts[0].seconds)) == (100, 0)


# ---- caches ----


def grown(random, width):
    """The shape of a tree of so many nodes."""
    return [random.randrange(node + 1) for node in range(width - 1)]


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_keep_the_cache(target, seed):
    """Rows join, grow, retire; every row's logits are those of a plain pass over its tokens."""
    random, model = Random(seed), TreeModel(target)

    def opened(rows):
        texts = [[random.randrange(60) for _ in range(random.randrange(1, 9))] for _ in range(rows)]
        session = model.session(rows, random.choice([4, 16]), 200)
        session.prefill(texts)
        return session, texts

    with resumed(model):
        session, texts = opened(random.randrange(1, 4))
        for _ in range(6):
            if len(texts) < 5 and random.random() < 0.5:
                other, more = opened(random.randrange(1, 3))
                session.join(other)
                texts += more
            elif texts:
                width = random.randrange(1, 5)
                trees = [toy_tree(random.sample(range(60), width), grown(random, width)) for _ in texts]
                session.score(trees)
                paths = [sorted(tree.ancestors(random.randrange(width))) for tree in trees]
                kept = [path if random.random() < 0.8 else None for path in paths]
                session.commit(kept)
                texts = [
                    [*text, *(int(tree.tokens[node]) for node in path)]
                    for text, tree, path in zip(texts, trees, kept, strict=True)
                    if path is not None
                ]
            session.cache.check_integrity()
            assert session.cache.lengths == [len(text) for text in texts]
        if texts:
            logits = session.score([toy_tree([7], [])] * len(texts))
            for row, text in enumerate(texts):
                wanted = target(torch.tensor([[*text, 7]])).logits[0, -1]
                torch.testing.assert_close(logits.row(row)[0], wanted, rtol=1e-9, atol=1e-9)


def test_caches_join_between_steps_only():
    first, second = TreeCache(1, 4), TreeCache(1, 4)
    second.stage([1], 1)
    with pytest.raises(CacheError, match="between steps"):
        first.join(second)


def test_prompts_of_one_token_join(target):
    """Nothing of them is in a cache yet."""
    made = decoder(target, [like(target)])
    prompts = [{"prompt": [token], "max_new_tokens": new} for token, new in zip(range(8), BUDGETS, strict=True)]
    found = taken(made.generate_many(prompts, max_rows=2, temperature=0))
    assert [row.token_ids for row in found] == [made.generate(**p, temperature=0).token_ids for p in prompts]


def test_a_least_number_of_tokens_needs_no_length_beside_it(target):
    """A prompt may say how long its text becomes, and by default it may become long."""
    made, common = decoder(target), {"min_new_tokens": 7, "eos_token_id": [*range(200)], "temperature": 0}
    prompts = [{"prompt": PROMPTS[0], "max_new_tokens": 9}, {"prompt": PROMPTS[1]}]
    found = [result.token_ids for result in taken(made.generate_many(prompts, **common))]
    assert found == [made.generate(**prompt, **common).token_ids for prompt in prompts]
    assert min(map(len, found)) >= 7


def test_least_lengths_are_compared_with_each_prompt(target):
    made, common = decoder(target), {"min_length": 12, "max_new_tokens": 4, "temperature": 0}
    found = {done.number: done.error for done in made.generate_many([[5] * 10, [5] * 3], **common)}
    assert found[0] is None
    assert "min_length=12 cannot be reached, at most 4 new tokens follow the prompt's 3" in str(found[1])


def test_closing_early_releases_the_models(target):
    made = decoder(target)
    found = made.generate_many(own(temperature=0), max_rows=2)
    assert len(list(islice(found, 2))) == 2
    found.close()
    assert made.generate(MANY[0], max_new_tokens=3, temperature=0).token_ids


def test_caches_of_many_rows_have_no_room_for_many_large_trees(target):
    """Passes read wide caches more slowly.  A tree that is larger makes the cache grow."""
    made, rows = decoder(target, [like(target)], BestFirst(31, 4)), 16
    slots = {}
    for count_ in (1, rows):
        rows_ = made.open([PROMPTS[0]] * count_, max_new_tokens=9).rows
        opened = Sessions(Openings(made, made.policy), rows_)
        slots[count_] = opened.target.cache.capacity - len(PROMPTS[0]) - 9
    assert slots == {1: size_bucket(32), rows: size_bucket(2)}
    alone = made.generate(PROMPTS[0], max_new_tokens=9)
    assert any(step.tree.num_drafted > slots[rows] for step in alone.steps)
    for result in made.generate([PROMPTS[0]] * rows, max_new_tokens=9):
        assert [step.tokens for step in result.steps] == [step.tokens for step in alone.steps]
