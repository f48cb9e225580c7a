"""Prompts that begin alike: the target reads what they share once, and every text is what it would be alone."""

import pytest
import torch
from conftest import like, tiny_llama
from test_heads import draft_for
from transformers import MistralConfig, MistralForCausalLM

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.attention import TreeCache, TreeModel, resumed
from specinfer.common.tensors import concat
from specinfer.engine.store import LEAST, PrefixStore, Text
from specinfer.errors import CacheError

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


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
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
    return session, [concat(parts) for parts in zip(begun, new, strict=True)]


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
                for mine, theirs in zip(*((each.stacks[0] + each.stacks[1]) for each in (session.cache, plain.cache))):
                    pair = (stack.data[:, row, :, :length] for stack in (mine, theirs))
                    torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-9)
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
