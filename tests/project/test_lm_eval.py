"""The adapter for the evaluation harness on a tiny model, with or without the harness: texts, likelihoods, passes.

What is wanted is computed by the rules of HFLM, the Hugging Face model of lm_eval 0.4.13, restated here.
"""

import random
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer, counted
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specinfer import BestFirst, SpecinferError, SpeculativeDecoder

EXAMPLE = Path(__file__).parents[2] / "examples" / "lm_eval_backend.py"
CONTEXT = 256  # of the tiny target
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ bos_token }}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not beside the tests")


class Instance(SimpleNamespace):
    """A request, as far as the adapter reads it."""


class StandIn:
    """The harness's model, as far as the adapter uses it: what it was given for the cache."""

    def __init__(self):
        self.cached = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *answer: self.cached.append(answer))


def merging(added):
    """A tokenizer of bytes in which ": " and ": C" are tokens, too; ``added`` says what it adds to a text ($A)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, ":Ġ", ":ĠC"])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[(":", "Ġ"), (":Ġ", "C")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "<eos>")])
    special = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "<eos>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=added, special_tokens=special)
    names = {"bos_token": "<s>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names)


TOKENIZERS = {
    "adds bos": lambda: merging("<s> $A"),
    "adds both": lambda: merging("<s> $A <eos>"),
    "has bos": lambda: merging("$A"),
    "no bos": byte_tokenizer,
}


@pytest.fixture(params=TOKENIZERS)
def adapter(target, near, monkeypatch, request):
    """The adapter of a decoder, on stand-ins for the two classes that it imports."""
    modules = {
        name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.instance", "lm_eval.api.model")
    }
    modules["lm_eval.api.instance"].Instance, modules["lm_eval.api.model"].LM = Instance, StandIn
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    decoder = SpeculativeDecoder(target, TOKENIZERS[request.param](), [near], BestFirst(7, 4), compile=False)
    return runpy.run_path(str(EXAMPLE))["SpecinferLM"](decoder, max_new_tokens=6)


adds_bos = pytest.mark.parametrize("adapter", ["adds bos"], indirect=True)


def asked(*arguments):
    return [Instance(args=args) for args in arguments]


def encoded(adapter, text):
    """Ids as HFLM's `tok_encode` makes them: with the special tokens of the tokenizer, unless one is there."""
    tokenizer = adapter.tokenizer
    return tokenizer.encode(text, add_special_tokens=not text.startswith(tokenizer.bos_token or tokenizer.eos_token))


def prefix(adapter):
    tokenizer = adapter.tokenizer
    return tokenizer.eos_token_id if tokenizer.bos_token is None else tokenizer.bos_token_id


def in_two(adapter, context, continuation):
    """Ids as `TemplateLM.loglikelihood` and its `_encode_pair` make them."""
    if context == "":
        ids = adapter.tokenizer.encode(continuation, add_special_tokens=False)
        return (ids[:1], ids[1:]) if ids[0] == prefix(adapter) else ([prefix(adapter)], ids)
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    before = encoded(adapter, context)
    return before, encoded(adapter, context + continuation)[len(before) :]


def by_hand(model, before, after):
    """The log-likelihood of tokens in one plain pass over at most as many as fit, and whether all are greedy."""
    ids = [*before, *after][-CONTEXT - 1 :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0]
    logits, tokens = logits[len(logits) - len(after) :], torch.tensor(after, dtype=torch.long)
    total = logits.log_softmax(-1).gather(1, tokens[:, None]).sum()
    return pytest.approx(float(total), abs=1e-9), bool((logits.argmax(-1) == tokens).all())


def continued(adapter, prompt, new, **options):
    """The text after a prompt, its ids made as HFLM makes them, that keeps its last ids if it is too long."""
    ids = encoded(adapter, prompt)[new - CONTEXT :]
    options = {"temperature": 0, "attention_mask": [1] * len(ids), "max_new_tokens": new, **options}
    return adapter.decoder.generate(ids, **options).text


def test_texts_are_those_of_generate_in_the_order_of_the_requests(adapter):
    """Of any number of requests, each with its options; a long prompt loses its beginning; one may look padded."""
    requests = [("x" * 300, {"until": None, "max_gen_toks": 3}), ("<pad><pad>", {}), ("<s>abc", {}), (" ", {})]
    requests += [(f"{i}, {i + 1}, ", {"max_gen_toks": i % 5 + 1, "until": "never"}) for i in range(20)]
    before = repr(requests)
    found = adapter.generate_until(asked(*requests))
    assert found == [continued(adapter, prompt, options.get("max_gen_toks", 6)) for prompt, options in requests]
    wanted = [("generate_until", args, answer) for args, answer in zip(requests, found, strict=True)]
    assert sorted(adapter.cached, key=repr) == sorted(wanted, key=repr)
    assert repr(requests) == before


def test_a_text_ends_before_its_first_stop_string(adapter):
    """In the order of the strings, as HFLM cuts; one that began in the prompt is none."""
    text = continued(adapter, "abc", 30)
    assert len(text) > 12
    for until in (text[2], [text[2]], [text[4:7], text[6:9]], [text[9:11], text[20:22], "never"], ["c" + text[0]]):
        wanted = text
        for stop in [until] if isinstance(until, str) else until:
            wanted = wanted.split(stop)[0]
        assert adapter.generate_until(asked(("abc", {"until": until, "max_gen_toks": 30}))) == [wanted]


def test_a_stop_string_ends_the_passes(adapter, target):
    """And so does the tokenizer's end of sequence, which this target's configuration does not name."""
    text = continued(adapter, "abc", 30)
    with counted(target) as whole:
        adapter.generate_until(asked(("abc", {"max_gen_toks": 30})))
    with counted(target) as passes:
        adapter.generate_until(asked(("abc", {"max_gen_toks": 30, "until": [text[2]]})))
    assert len(passes) < len(whole)
    eos = {"sequence_bias": [[[adapter.tokenizer.eos_token_id], 1e9]]}
    with counted(target) as passes:
        assert adapter.generate_until(asked(("abc", {"max_gen_toks": 30, **eos}))) == [""]
    assert len(passes) <= 2


@adds_bos
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *[({name: 4}, {"max_new_tokens": 4}) for name in ("max_new_tokens", "max_tokens", "max_completion_tokens")],
        ({"max_gen_toks": None, "max_new_tokens": 3}, {"max_new_tokens": 3}),
        ({"max_length": 12}, {"max_new_tokens": 8}),
        ({"do_sample": False, "temperature": 1}, {}),
        ({"do_sample": None, "temperature": None}, {}),
        ({"temperature": 0.0}, {}),
        ({"do_sample": True, "temperature": 1.0, "top_k": 1}, {}),
        ({"temperature": 0.9, "seed": 3}, {"temperature": 0.9, "seed": 3}),
        ({"do_sample": True, "temperature": 2.0, "seed": 4}, {"temperature": 2.0, "seed": 4}),
        ({"temperature": 2.0, "seed": 5, "top_k": 3}, {"temperature": 2.0, "seed": 5, "top_k": 3}),
        ({"temperature": 2.0, "seed": 6, "top_p": 0.4}, {"temperature": 2.0, "seed": 6, "top_p": 0.4}),
        ({"repetition_penalty": 3.0}, {"repetition_penalty": 3.0}),
        ({"suppress_tokens": [*range(0, 256, 2)]}, {"suppress_tokens": [*range(0, 256, 2)]}),
        ({"num_beams": 1, "use_cache": True}, {}),
    ],
    ids=str,
)
def test_options_of_a_request_are_honoured(adapter, given, meant):
    adapter.max_new_tokens = 20
    wanted = continued(adapter, "abc", **{"new": 20, **meant})
    assert adapter.generate_until(asked(("abc", given))) == [wanted]
    if meant:
        assert wanted != continued(adapter, "abc", 20)


@adds_bos
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"stop": ["a"]}, "stop"),
        ({"top_k": 5}, "top_k=5 has no effect"),
        ({"do_sample": False, "temperature": 0.7}, "temperature=0.7 has no effect"),
        ({"do_sample": True}, "temperature=0 is greedy"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"num_return_sequences": 2, "temperature": 1.0}, "several texts"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_length": 3}, "max_length=3"),
        ({"max_gen_toks": CONTEXT}, f"context of {CONTEXT}"),
        *[({name: [1]}, name) for name in ("prompt", "input_ids", "attention_mask", "stopping_criteria")],
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured_are_refused_by_name(adapter, given, named):
    with pytest.raises((SpecinferError, TypeError), match=named):
        adapter.generate_until(asked(("abc", given)))


@adds_bos
def test_of_several_limits_the_first_counts_and_a_warning_names_them(adapter):
    with pytest.warns(UserWarning, match="'max_gen_toks': 5, 'max_tokens': 2"):
        found = adapter.generate_until(asked(("abc", {"max_tokens": 2, "max_gen_toks": 5})))
    assert found == [continued(adapter, "abc", 5)]


def test_likelihoods_are_those_of_a_plain_pass(adapter, target):
    """Choices in any order, no context, special tokens, tokens across the border, contexts that are too long."""
    pairs = [(f"question {i}:", f" {choice}") for i in range(6) for choice in ("yes", "no", "maybe so")]
    pairs += [("Q", ": C"), ("Q:", " "), ("Q: ", "maybe"), ("Answer", ": C or D"), ("Answer \n", "C")]
    pairs += [("", "abc"), ("", "<s>abc"), ("<s>question", " C"), ("<eos>a", "b"), ("a", "b"), ("a<pad><pad>", "b")]
    pairs += [("y" * length, " zz") for length in range(CONTEXT - 4, CONTEXT + 3)]
    pairs += [("y", "z" * length) for length in (CONTEXT - 1, CONTEXT)]
    random.Random(0).shuffle(pairs)
    found = adapter.loglikelihood(asked(*pairs))
    assert found == [by_hand(target, *in_two(adapter, *pair)) for pair in pairs]
    assert [args for _, args, _ in adapter.cached] == pairs


@pytest.mark.parametrize("adapter", ["adds bos", "no bos"], indirect=True)
def test_what_greedy_decoding_writes_is_said_to_be_that(adapter):
    text = continued(adapter, "abc", 1)
    found = adapter.loglikelihood(asked(("abc", text), ("abc", text + text + "xyz")))
    assert [is_greedy for _, is_greedy in found] == [True, False]


@adds_bos
def test_a_continuation_whose_token_began_in_the_context_is_certain(adapter):
    """HFLM answers so for one beside continuations of one token, and fails for one alone."""
    assert in_two(adapter, "Answer:", " C")[1] == []
    alone = adapter.loglikelihood(asked(("Answer:", " C")))
    found = adapter.loglikelihood(asked(("Answer:", " D"), ("Answer:", " C"), ("Answer:", " E")))
    assert alone == [found[1]] == [(0.0, True)]
    assert found[0] != found[2] != (0.0, True)


@pytest.mark.parametrize("adapter", ["adds bos", "no bos"], indirect=True)
def test_the_choices_of_a_question_take_two_passes(adapter, target):
    pairs = [(f"question {i}:", f" {choice}") for choice in "abcd" for i in range(8)]
    adapter.loglikelihood(asked(*pairs[:1]))
    with counted(target) as passes:
        adapter.loglikelihood(asked(*pairs))
    assert len(passes) == 2


@pytest.mark.parametrize("length", [0, 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 700])
def test_whole_texts_are_scored_in_windows(adapter, target, length):
    """Every token once, below as many as fit: the windows of lm_eval's `get_rolling_token_windows`."""
    chance = random.Random(length)
    ids = encoded(adapter, text := "".join(chance.choice("abcdef ") for _ in range(length)))
    wanted = 0.0
    for start in range(0, len(ids), CONTEXT):
        end = min(start + CONTEXT, len(ids))
        before = ids[end - CONTEXT - 1 : start] if start else [prefix(adapter)]
        wanted += by_hand(target, before, ids[start:end])[0].expected
    short = by_hand(target, [prefix(adapter)], encoded(adapter, "abc"))[0]
    assert adapter.loglikelihood_rolling(asked((text,), ("abc",))) == [pytest.approx(wanted), short]


@adds_bos
def test_messages_become_a_prompt_with_one_beginning(adapter):
    """Without the system's, which this template refuses; the answer may be begun."""
    user, begun = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "he"}
    text = adapter.apply_chat_template([{"role": "system", "content": "be kind"}, user])
    assert text == "<s>[user]hi[assistant]"
    assert adapter.apply_chat_template([user, begun], add_generation_prompt=False) == "<s>[user]hi[assistant]he"
    assert encoded(adapter, text).count(adapter.tokenizer.bos_token_id) == 1
    assert adapter.generate_until(asked((text, {}))) == [continued(adapter, text, 6)]


@adds_bos
def test_the_harness_is_told_the_names_of_tokenizer_and_template(adapter):
    adapter.tokenizer.name_or_path = "maker/model"
    assert adapter.tokenizer_name == "maker__model"
    assert (adapter.chat_template(False), adapter.chat_template(True)) == (None, TEMPLATE)
    adapter.tokenizer.chat_template = {"default": "a", "rag": "b"}
    assert (adapter.chat_template(True), adapter.chat_template("rag")) == ("a", "b")


@adds_bos
@pytest.mark.parametrize(
    ("said", "exact", "by_tokenizer", "context"),
    [
        (0, None, None, 2048),
        (0, None, 512, 512),
        (256, None, 512, 256),
        (256, 1024, 512, 256),  # extended, which HFLM does not read
        (256, 128, None, 128),
    ],
)
def test_the_context_is_that_of_the_harness_or_as_long_as_trees_are_exact(
    adapter, monkeypatch, said, exact, by_tokenizer, context
):
    decoder = adapter.decoder
    monkeypatch.setattr(decoder.target.model.config, "max_position_embeddings", said)
    monkeypatch.setattr(decoder.target, "position_limit", lambda: exact)
    if by_tokenizer:
        adapter.tokenizer.model_max_length = by_tokenizer
    assert type(adapter)(decoder).context == context
