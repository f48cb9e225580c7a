"""The caller's logits processors and stopping criteria, in every way to decode several rows: each row is as alone."""

import functools
import threading

import pytest
import torch
from conftest import PROMPTS, VOCAB, like, oracle, plain, tiny_llama
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import PrefixConstrainedLogitsProcessor

import specinfer
from specinfer import BestFirst, Chain, Sampled, SpeculativeDecoder
from specinfer.engine.callables import BatchRow, as_functions, for_row
from specinfer.errors import SamplingError

NEW = 10
ALLOWED = [range(10 * row, 10 * row + 10) for row in range(len(PROMPTS))]  # tokens of each row's text


def row_of(token):
    return token // 10


class Grammar(LogitsProcessor):
    """Allows each token of a cycle in turn.  Like a matcher it advances with the calls, and each token must follow."""

    def __init__(self, cycle, start):
        self.cycle, self.start, self.calls = list(cycle), start, 0

    def __call__(self, ids, scores):
        """Allow the next token."""
        if self.calls:
            assert ids[0, -1] == self.cycle[(self.calls - 1) % len(self.cycle)]
        assert self.start is None or ids.shape[1] == self.start + self.calls
        self.calls += 1
        allowed = torch.full_like(scores, -torch.inf)
        token = self.cycle[(self.calls - 1) % len(self.cycle)]
        allowed[:, token] = scores[:, token]
        return allowed


class AfterStart(StoppingCriteria):
    """Stops four tokens after the first call."""

    def __init__(self):
        self.start = None

    def __call__(self, ids, scores, **_):
        """Count from the first call."""
        self.start = ids.shape[1] - 1 if self.start is None else self.start
        return torch.full((len(ids),), ids.shape[1] - self.start >= 4)


class Biased(LogitsProcessor):
    """A bias with a row for each row of the batch."""

    def __init__(self, rows):
        self.bias = torch.zeros(rows, VOCAB, dtype=torch.float64)
        for row in range(rows):
            self.bias[row, list(ALLOWED[row])] = 1e3

    def __call__(self, ids, scores):
        """Add the bias."""
        return scores + self.bias


class Enumerating(LogitsProcessor):
    """Looks its tokens up by the row's place in the batch."""

    def __call__(self, ids, scores):
        """Allow each row its tokens."""
        answer = torch.full_like(scores, -torch.inf)
        for row, _ in enumerate(ids):
            answer[row, list(ALLOWED[row])] = scores[row, list(ALLOWED[row])]
        return answer


def constraint():
    return PrefixConstrainedLogitsProcessor(lambda row, ids: [*ALLOWED[row]], 1)


def factory(row):
    return lambda ids, scores: scores.index_fill(1, torch.tensor([v for v in range(VOCAB) if row_of(v) != row]), -1e9)


INDEXED = {
    "a prefix constraint": constraint,
    "a bias by row": lambda: Biased(len(PROMPTS)),
    "a loop over rows": Enumerating,
    "a list in a list": lambda: [LogitsProcessorList([constraint()])],
    "a factory": lambda: factory,
    "a factory with arguments": lambda: functools.partial(lambda row, scale: factory(row * scale), scale=1),
}


@pytest.fixture(scope="module")
def decoder(target, near):
    return SpeculativeDecoder(target, None, [near, "ngram"], BestFirst(9, 4), compile=False)


def inside(results):
    return [all(token in ALLOWED[row] for token in result.token_ids) for row, result in enumerate(results)]


@pytest.mark.parametrize("kind", INDEXED)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_what_differs_by_row_is_the_rows_own(decoder, target, kind, options):
    """In ragged batches, with more rows than run at a time: each row gets its number, and plain decoding's text."""
    given = {"max_new_tokens": NEW, **options}
    results = decoder.generate(PROMPTS, logits_processor=INDEXED[kind](), max_rows=3, **given)
    assert inside(results) == [True] * len(PROMPTS)
    reference = SpeculativeDecoder(target, tree=None, compile=False)
    for row, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        alone = reference.generate(prompt, logits_processor=[factory(row)], **given)
        assert result.token_ids == alone.token_ids


@pytest.mark.parametrize("kind", INDEXED)
def test_several_texts_of_a_prompt_are_rows(decoder, kind):
    """transformers numbers the sequences, not the prompts; so do we."""
    given = {"num_return_sequences": 2, "temperature": 1.0, "seed": 3, "max_new_tokens": NEW}
    assert inside(decoder.generate(PROMPTS[:2], logits_processor=INDEXED[kind](), **given)) == [True] * 4


def test_a_batch_of_equal_prompts_equals_transformers(decoder, target):
    """(B, T) as transformers hands it over, with a bias by row."""
    prompts = [[5, 9, 17], [40, 3, 2], [100, 7, 31]]
    ids = torch.tensor(prompts)
    for processor in (Biased(3), Enumerating(), constraint()):
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        wanted = target.generate(
            ids, attention_mask=torch.ones_like(ids), logits_processor=LogitsProcessorList([processor]), **options
        )[:, 3:].tolist()
        found = decoder.generate(prompts, max_new_tokens=NEW, temperature=0, logits_processor=processor)
        assert [result.token_ids for result in found] == wanted


def test_many_prompts_are_calls_of_their_own(decoder):
    """A prefix constraint and a factory get the prompt's number; what tells equal rows apart is refused."""
    for processor in (constraint(), factory):
        found = sorted(decoder.generate_many(PROMPTS, max_rows=2, max_new_tokens=NEW, logits_processor=processor))
        assert inside(result for _, result, _ in found) == [True] * len(PROMPTS)
    for processor, reason in ((Enumerating(), "answers equal rows differently"), (Biased(2), "equal rows differently")):
        with pytest.raises(SamplingError, match=reason):
            list(decoder.generate_many(PROMPTS, max_new_tokens=NEW, logits_processor=processor))


def test_a_prompt_of_many_may_bring_its_own(decoder):
    """Its functions see the prompt alone, as row 0; common ones beside them are copied."""
    asked = [
        {"prompt": prompt, "logits_processor": Grammar([row + 3, row + 50], len(prompt))}
        for row, prompt in enumerate(PROMPTS)
    ]
    found = sorted(decoder.generate_many(asked, max_rows=2, max_new_tokens=NEW, stopping_criteria=AfterStart()))
    assert [result.token_ids for _, result, _ in found] == [[row + 3, row + 50] * 2 for row in range(len(PROMPTS))]


# ---- state ----

TREES = {"chain": Chain(4), "best-first": BestFirst(9, 4), "sampled": Sampled((2, 1)), "auto": "auto", "plain": None}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_matcher_is_called_once_for_every_token_in_order(target, near, tree):
    """One that advances with each call: in every kind of tree, alone and in a batch, with a gate as well."""
    decoder = SpeculativeDecoder(target, None, [near], tree, confidence_gate=0.1, compile=False)
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        given = {"max_new_tokens": NEW, **options}
        alone = decoder.generate(PROMPTS[0], logits_processor=Grammar([3, 4, 5], len(PROMPTS[0])), **given)
        assert alone.token_ids == [3, 4, 5] * 3 + [3]
        batch = decoder.generate(PROMPTS, logits_processor=Grammar([3, 4, 5], None), **given)
        many = decoder.generate_many(PROMPTS, max_rows=2, logits_processor=Grammar([3, 4, 5], None), **given)
        for result in [*batch, *(result for _, result, _ in many)]:
            assert result.token_ids == alone.token_ids


def test_a_matcher_is_not_asked_beyond_the_end(target):
    """Where the end of sequence was drafted, and more after it."""
    script = [3, 4, 5, 9]
    draft = oracle(target)
    draft.future = lambda row: [*script, 7, 7, 7][len(row) - len(PROMPTS[0]) :]
    decoder = SpeculativeDecoder(target, None, [draft], Chain(6), compile=False)
    grammar = Grammar(script, len(PROMPTS[0]))
    result = decoder.generate(PROMPTS[0], max_new_tokens=NEW, eos_token_id=9, temperature=0, logits_processor=grammar)
    assert (result.token_ids, result.finish_reason) == (script, "eos")
    assert result.stats.target_passes == 1
    assert grammar.calls == len(script)


@pytest.mark.parametrize("several", [False, True])
def test_criteria_remember_their_own_row(decoder, several):
    """Where a row began, for example."""
    options = {"max_new_tokens": NEW, "temperature": 0, "stopping_criteria": AfterStart()}
    if several:
        results = [result for _, result, _ in decoder.generate_many(PROMPTS, max_rows=2, **options)]
    else:
        results = decoder.generate(PROMPTS, max_rows=3, **options)
    assert [len(result.token_ids) for result in results] == [4] * len(PROMPTS)


def test_an_object_that_is_processor_and_criterion_is_one_object_in_each_row(decoder):
    class Both:
        """Stops when it has processed three tokens."""

        def __init__(self):
            self.calls = 0

        def process(self, ids, scores):
            self.calls += 1
            return scores

        def stop(self, ids, scores):
            return self.calls >= 3

    both = Both()
    given = {"logits_processor": both.process, "stopping_criteria": both.stop, "max_new_tokens": NEW}
    results = decoder.generate(PROMPTS, temperature=0, **given)
    assert [result.stats.target_passes > 0 and len(result.token_ids) <= 3 for result in results] == [True] * 4
    assert both.calls == 0
    decoder.generate(PROMPTS[0], temperature=0, **given)
    assert both.calls >= 3  # a single row uses the object itself, as in transformers


class Counter:
    """Counts."""

    def __init__(self):
        self.calls = 0

    def count(self):
        """Count."""
        self.calls += 1


def counting_by(kind):
    """A function that counts its calls where rows would share the count."""
    calls, total = {"all": 0}, 0

    def in_a_container(ids, scores):
        calls["all"] += 1
        return scores

    def in_a_variable(ids, scores):
        nonlocal total
        total += 1
        return scores

    def in_a_default(ids, scores, seen=[]):  # noqa: B006
        seen.append(ids)
        return scores

    def in_an_attribute(ids, scores):
        in_an_attribute.calls += 1
        return scores

    in_an_attribute.calls = 0
    script, buffer, counter = iter(range(99)), torch.zeros(1), Counter()

    def in_an_iterator(ids, scores):
        next(script)
        return scores

    def in_a_tensor(ids, scores):
        buffer.add_(1)
        return scores

    def in_an_object(ids, scores):
        counter.calls += 1
        return scores

    count = counter.count

    def in_a_method(ids, scores):
        count()
        return scores

    return locals()[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("in_a_container", "in_a_variable", "in_a_default", "in_an_attribute"),
        *("in_an_iterator", "in_a_tensor", "in_an_object", "in_a_method"),
    ],
)
def test_functions_that_keep_state_are_refused_for_several_rows(decoder, kind):
    """With the way out; a single row may keep it, and so may a factory."""
    given = {"max_new_tokens": 3, "temperature": 0}
    with pytest.raises(SamplingError, match=r"rows would share( it| that)?: give a function of one argument"):
        decoder.generate(PROMPTS, logits_processor=counting_by(kind), **given)
    with pytest.raises(SamplingError, match="rows would share"):
        list(decoder.generate_many(PROMPTS, logits_processor=counting_by(kind), **given))
    assert decoder.generate(PROMPTS[0], logits_processor=counting_by(kind), **given).token_ids
    assert len(decoder.generate(PROMPTS, logits_processor=lambda row: counting_by(kind), **given)) == len(PROMPTS)


def test_what_cannot_be_copied_is_refused_for_several_rows(decoder):
    class Locked(StoppingCriteria):
        """Waits for others."""

        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, ids, scores, **_):
            return False

    with pytest.raises(SamplingError, match=r"cannot be copied for each row .*: give a function of one argument"):
        decoder.generate(PROMPTS, max_new_tokens=3, stopping_criteria=Locked())
    assert decoder.generate(PROMPTS[0], max_new_tokens=3, stopping_criteria=Locked()).token_ids
    shared = Locked()
    assert len(decoder.generate(PROMPTS, max_new_tokens=3, stopping_criteria=lambda row: shared)) == len(PROMPTS)


def test_models_that_an_object_holds_are_not_copied(target):
    class Reward(LogitsProcessor):
        """Scores by a model."""

        def __init__(self):
            self.model = target

        def __call__(self, ids, scores):
            return scores

    ((own,),) = for_row(BatchRow(1, 3), [Reward()])
    assert own.function.model is target


@pytest.mark.parametrize("given", [lambda row: 3, lambda row: LogitsProcessorList, lambda row: lambda ids: ids])
def test_a_factory_of_something_else_is_refused_by_name(decoder, given):
    with pytest.raises(SamplingError, match="for row 0, which takes no ids and scores"):
        decoder.generate(PROMPTS, max_new_tokens=3, logits_processor=given)


def test_a_factory_that_fails_is_named(decoder):
    with pytest.raises(SamplingError, match=r"takes one argument, row number 2: KeyError: 2"):
        decoder.generate(PROMPTS, max_new_tokens=3, logits_processor=lambda row: {0: factory(0), 1: factory(1)}[row])


def test_wrong_answers_name_the_shape(decoder):
    with pytest.raises(SamplingError, match=r"returns \(1, 3\) in place of scores \(4, 264\)"):
        decoder.generate(PROMPTS, max_new_tokens=3, logits_processor=lambda ids, scores: scores[:1, :3])
    with pytest.raises(SamplingError, match="or one of them for each of 4 rows"):
        decoder.generate(PROMPTS, max_new_tokens=3, stopping_criteria=lambda ids, scores: [False, True])


def test_errors_of_a_function_say_that_rows_are_shown_together(decoder):
    def fail(ids, scores):
        raise ValueError("odd")

    with pytest.raises(ValueError, match="odd") as caught:
        decoder.generate(PROMPTS, max_new_tokens=3, logits_processor=fail)
    assert "called for 4 equal rows" in caught.value.__notes__[0]


# ---- inside transformers ----


def test_custom_generate_gives_each_row_its_own(target):
    """State, numbers and padding as transformers has them: a matcher, a criterion, a constraint, a bias."""
    ids = torch.tensor([[0, 0, 5, 9], [40, 3, 2, 9], [0, 7, 7, 31]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    ours = {"custom_generate": specinfer.custom_generate, "assistant_model": like(target), "tree": BestFirst(9, 4)}
    for processor in (constraint(), Biased(3), Enumerating()):
        given = {**options, "logits_processor": LogitsProcessorList([processor])}
        assert target.generate(ids, **given, **ours).tolist() == target.generate(ids, **given).tolist()
    matched = LogitsProcessorList([Grammar([3, 4, 5], 4)])
    found = target.generate(ids, **options, **ours, logits_processor=matched)[:, 4:].tolist()
    assert found == [[3, 4, 5] * 3 + [3]] * 3
    long = StoppingCriteriaList([lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 9)])
    given = {**options, "stopping_criteria": long}
    assert target.generate(ids, **given, **ours).tolist() == target.generate(ids, **given).tolist()


def test_lists_take_functions_of_two_arguments_or_a_rows_number():
    assert as_functions("logits_processor", None) == ()
    assert len(as_functions("logits_processor", [LogitsProcessorList([constraint()]), factory])) == 2
    with pytest.raises(SamplingError, match="takes no ids and scores"):
        as_functions("logits_processor", [lambda: 0])


def test_greedy_text_is_transformers_own(target, decoder):
    """A function of ids alone, shown four rows: nothing of a row's answer depends on the others."""

    def odd(ids, scores):
        return scores + (ids.sum(1, keepdim=True) * torch.arange(VOCAB) % 11).to(scores.dtype)

    results = decoder.generate(PROMPTS, max_new_tokens=NEW, temperature=0, logits_processor=odd)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == plain(target, prompt, NEW, logits_processor=LogitsProcessorList([odd]))


def test_another_vocabulary_makes_no_difference():
    """A small one, where more rows than tokens are shown."""
    model = tiny_llama(3, vocab=3)
    decoder = SpeculativeDecoder(model, None, ["ngram"], BestFirst(4, 2), compile=False)
    prompts = [[row % 3] for row in range(5)]
    results = decoder.generate(
        prompts, max_new_tokens=5, temperature=0, logits_processor=lambda ids, scores: scores.flip(1)
    )
    for prompt, result in zip(prompts, results, strict=True):
        alone = decoder.generate(prompt, max_new_tokens=5, temperature=0, logits_processor=lambda _, s: s.flip(1))
        assert result.token_ids == alone.token_ids
