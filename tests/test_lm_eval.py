"""The adapter for the evaluation harness on a tiny model, with or without the harness: texts, likelihoods, passes."""

import random
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer, counted, like

from specinfer import BestFirst, SpeculativeDecoder

EXAMPLE = Path(__file__).parent.parent / "examples" / "lm_eval_backend.py"
CONTEXT = 256  # of the tiny target

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not beside the tests")


class Instance(SimpleNamespace):
    """A request, as far as the adapter reads it."""


class StandIn:
    """The harness's model, as far as the adapter uses it: what it was given for the cache."""

    def __init__(self):
        self.cached = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *answer: self.cached.append(answer))


@pytest.fixture
def adapter(target, monkeypatch):
    """The adapter of a decoder, on stand-ins for the two classes that it imports."""
    modules = {
        name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.instance", "lm_eval.api.model")
    }
    modules["lm_eval.api.instance"].Instance, modules["lm_eval.api.model"].LM = Instance, StandIn
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    decoder = SpeculativeDecoder(target, byte_tokenizer(), [like(target)], BestFirst(7, 4), compile=False)
    return runpy.run_path(str(EXAMPLE))["SpecinferLM"](decoder, max_new_tokens=6)


def asked(*arguments):
    return [Instance(args=args) for args in arguments]


def ids_of(text):
    return list(byte_tokenizer()(text)["input_ids"])


def by_hand(model, ids, first):
    """The log-likelihood of the tokens from index ``first`` on, in one plain pass, and whether all are greedy."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, first - 1 : -1]
    tokens = torch.tensor(ids[first:])
    total = logits.log_softmax(-1).gather(1, tokens[:, None]).sum()
    return float(total), bool((logits.argmax(-1) == tokens).all())


def test_texts_are_those_of_generate_in_the_order_of_the_requests(adapter):
    """Of any number of requests, each with its options; a stop string is cut off, a long prompt loses its beginning."""
    decoder = adapter.decoder
    text = decoder.generate("abc", max_new_tokens=6, temperature=0).text
    stop = text[2]
    requests = [("abc", {"until": [stop]}), ("x" * 300, {"until": None, "max_gen_toks": 3})]
    requests += [(f"{i}, {i + 1}, ", {"max_gen_toks": i % 5 + 1, "until": "never"}) for i in range(20)]
    found = adapter.generate_until(asked(*requests))
    assert found[0] == text[: text.index(stop)]
    assert found[1] == decoder.generate("x" * (CONTEXT - 3), max_new_tokens=3, temperature=0).text
    for (prompt, options), answer in zip(requests[2:], found[2:], strict=True):
        assert answer == decoder.generate(prompt, max_new_tokens=options["max_gen_toks"], temperature=0).text
    assert sorted(adapter.cached, key=repr) == sorted(
        [("generate_until", args, answer) for args, answer in zip(requests, found, strict=True)], key=repr
    )


def test_likelihoods_are_those_of_a_plain_pass(adapter, target):
    """Several questions with choices in any order, no context at all, and one that is too long."""
    pairs = [(f"question {i}:", f" {choice}") for i in range(6) for choice in ("yes", "no", "maybe so")]
    random.Random(0).shuffle(pairs)
    pairs += [("", "abc"), ("y" * 300, " z")]
    found = adapter.loglikelihood(asked(*pairs))
    for (context, continuation), answer in zip(pairs, found, strict=True):
        before = ids_of(context) or adapter.prefix
        ids = [*before, *ids_of(continuation)][-CONTEXT:]
        assert answer == (pytest.approx(by_hand(target, ids, len(ids) - len(continuation))[0]), answer[1])
        assert answer[1] == by_hand(target, ids, len(ids) - len(continuation))[1]
    assert [args for _, args, _ in adapter.cached] == pairs


def test_the_choices_of_a_question_take_two_passes(adapter, target):
    pairs = [(f"question {i}:", f" {choice}") for choice in "abcd" for i in range(8)]
    adapter.loglikelihood(asked(*pairs[:1]))
    with counted(target) as passes:
        adapter.loglikelihood(asked(*pairs))
    assert len(passes) == 2


@pytest.mark.parametrize("length", [1, CONTEXT - 1, CONTEXT, 700])
def test_whole_texts_are_scored_in_windows(adapter, target, length):
    """Every token once, below as many as fit."""
    chance = random.Random(length)
    text = "".join(chance.choice("abcdef ") for _ in range(length))
    ids, size = ids_of(text), CONTEXT - 1
    wanted = 0.0
    for start in range(0, length, size):
        end = min(start + size, length)
        window = [*adapter.prefix, *ids[:end]] if not start else ids[end - size - 1 : end]
        wanted += by_hand(target, window, len(window) - (end - start))[0]
    assert adapter.loglikelihood_rolling(asked((text,), ("abc",))) == [
        pytest.approx(wanted),
        pytest.approx(by_hand(target, [*adapter.prefix, *ids_of("abc")], 1)[0]),
    ]
