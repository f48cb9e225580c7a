"""What callers give: tokenizers' output, padding, numbers of numpy and torch, and everything of a wrong type."""

import numpy as np
import pytest
import torch
from conftest import EOS_TEXT, PAD_TEXT, PROMPTS, byte_tokenizer, counted, following, tiny_llama
from transformers import (
    BatchEncoding,
    BertConfig,
    BertLMHeadModel,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessorList,
)

from specinfer import BestFirst, Chain, Expansion, Sampled, SpeculativeDecoder, compare
from specinfer.errors import InputError, ModelError, PolicyError, SamplingError, SpecinferError
from specinfer.evaluation.traces import record, replay


@pytest.fixture(scope="module")
def decoder(target):
    return SpeculativeDecoder(target, byte_tokenizer(), tree=BestFirst(4, 2))


def ids(decoder, *prompt, **options):
    """The prompt ids that were read, of one prompt or a batch."""
    result = decoder.generate(*prompt, max_new_tokens=2, **options)
    return [own.prompt_ids for own in result] if isinstance(result, list) else result.prompt_ids


# ---- what a tokenizer returns ----


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_what_a_tokenizer_returns_is_a_prompt(decoder, side, tensors):
    """Padded on either side, as a whole, as keyword arguments, as a plain dict, as ids and mask."""
    texts = ["hello there", "hi", "a b"]
    tokenizer = byte_tokenizer(padding_side=side)
    wanted = [tokenizer(text)["input_ids"] for text in texts]
    inputs = tokenizer(texts, padding=True, return_tensors=tensors, return_token_type_ids=False)
    assert ids(decoder, inputs) == wanted
    assert ids(decoder, dict(inputs)) == wanted
    assert ids(decoder, **inputs) == wanted
    assert ids(decoder, inputs["input_ids"], attention_mask=inputs["attention_mask"]) == wanted


def test_one_row_or_many(decoder):
    """A flat row is one prompt, a table is a batch."""
    inputs = byte_tokenizer()("hi")
    assert ids(decoder, inputs) == ids(decoder, input_ids=inputs["input_ids"]) == inputs["input_ids"]
    assert ids(decoder, byte_tokenizer()("hi", return_tensors="pt")) == [inputs["input_ids"]]
    assert "".join(decoder.stream(**inputs, max_new_tokens=2)) == decoder.generate("hi", max_new_tokens=2).text


def test_text_after_padding_is_that_of_the_row_alone(decoder):
    """Padding leaves no trace."""
    batch = BatchEncoding({"input_ids": [[PAD_TEXT, 104, 105], [7, 8, 9]], "attention_mask": [[0, 1, 1], [1, 1, 1]]})
    alone = decoder.generate([104, 105], max_new_tokens=8)
    assert decoder.generate(batch, max_new_tokens=8)[0].token_ids == alone.token_ids


BESIDE = {
    "hole": ({"attention_mask": [1, 0, 1]}, "hole"),
    "nothing kept": ({"attention_mask": [0, 0, 0]}, "row 0 is empty"),
    "too short": ({"attention_mask": [1, 1]}, "attention_mask does not have the shape"),
    "too deep": ({"attention_mask": [[[1, 1, 1]]]}, "attention_mask does not have the shape"),
    "additive": ({"attention_mask": [0.0, -1e9, 0.0]}, "other numbers than 0 and 1"),
    "text": ({"attention_mask": "111"}, "attention_mask does not have the shape"),
    "positions": ({"position_ids": [3, 4, 5]}, "position_ids"),
    "special tokens": ({"special_tokens_mask": [0, 0, 0]}, "special_tokens_mask"),
}


@pytest.mark.parametrize(("beside", "message"), BESIDE.values(), ids=BESIDE.keys())
def test_what_cannot_be_honoured_beside_ids_is_refused_by_name(decoder, target, beside, message):
    """As a whole and as keyword arguments, before a model runs."""
    inputs = {"input_ids": [5, 6, 7], **beside}
    with counted(target) as passes:
        for call in (lambda: decoder.generate(inputs), lambda: decoder.generate(**inputs)):
            with pytest.raises((InputError, SamplingError), match=message):
                call()
    assert not passes


def test_usual_positions_are_taken(decoder):
    """Counted from 0 where padding is left out, as transformers does."""
    padded = {"input_ids": [PAD_TEXT, 5, 6], "attention_mask": [0, 1, 1], "position_ids": [0, 0, 1]}
    assert ids(decoder, padded) == [5, 6]
    with pytest.raises(InputError, match="position_ids"):
        decoder.generate({**padded, "position_ids": [0, 1, 2]})


def test_two_prompts_or_none_are_refused(decoder):
    """A prompt and input_ids, or neither."""
    for arguments in ({}, {"prompt": "hi", "input_ids": [5]}, {"input_ids": "hi"}):
        with pytest.raises(InputError, match="one prompt"):
            decoder.generate(**arguments)


# ---- padding that nobody names ----


@pytest.mark.parametrize(
    "rows",
    [
        [[PAD_TEXT, 5, 6], [7, 8, 9]],
        [[5, 6, PAD_TEXT], [7, 8, 9]],
        [[PAD_TEXT, PAD_TEXT, 5]],
        [[5, PAD_TEXT, PAD_TEXT], [5, PAD_TEXT, PAD_TEXT]],
    ],
    ids=str,
)
def test_ids_that_look_padded_need_a_mask(decoder, target, rows):
    """Padding is not read as text; with a mask of ones it is what the caller says it is."""
    with counted(target) as passes, pytest.raises(InputError, match="looks padded"):
        decoder.generate(torch.tensor(rows))
    assert not passes
    assert ids(decoder, torch.tensor(rows), attention_mask=torch.ones(len(rows), 3)) == rows


@pytest.mark.parametrize(
    "rows", [[[5, 6, PAD_TEXT]], [[PAD_TEXT, 5], [PAD_TEXT, 6]], [[5, PAD_TEXT], [7, 8, 9]], [[PAD_TEXT]]], ids=str
)
def test_one_pad_token_may_end_or_begin_a_text(decoder, rows):
    """The pad token is often the end of sequence, and one of them is no padding."""
    assert ids(decoder, rows) == rows


# ---- token types ----


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return BertLMHeadModel(BertConfig(vocab_size=96, is_decoder=True, max_position_embeddings=64, **sizes)).eval()


TYPES = [(tiny_llama, 1, True), (gpt2, 0, False), (gpt2, 1, False), (bert, 0, True), (bert, 1, False)]


@pytest.mark.parametrize(("make", "kind", "harmless"), TYPES)
def test_token_types_are_taken_only_where_they_change_nothing(make, kind, harmless):
    """Llama has none, GPT-2 adds an embedding for 0, too, BERT takes none for 0."""
    decoder = SpeculativeDecoder(make(), tree=None)
    inputs = {"input_ids": [5, 6, 7], "token_type_ids": [kind] * 3}
    if harmless:
        wanted = decoder.generate([5, 6, 7], max_new_tokens=4)
        assert decoder.generate(inputs, max_new_tokens=4).token_ids == wanted.token_ids
    else:
        with pytest.raises(InputError, match="token_type_ids"):
            decoder.generate(inputs)


# ---- plainly meant ----

MEANT = {
    "numpy": {"temperature": np.float32(0.5), "top_k": np.int64(5), "seed": np.int64(5), "max_new_tokens": np.int32(6)},
    "torch": {
        "temperature": torch.tensor(0.5),
        "top_k": torch.tensor(5),
        "seed": torch.tensor(5),
        "max_new_tokens": torch.tensor(6),
    },
    "a dict": {"generation_config": {"temperature": 0.5, "top_k": 5, "max_new_tokens": 6}, "seed": 5},
    "a config": {
        "generation_config": GenerationConfig(do_sample=True, temperature=0.5, top_k=5, max_new_tokens=6),
        "seed": [5],
    },
    "flags": {"do_sample": np.bool_(True), "temperature": 0.5, "top_k": 5, "max_new_tokens": 6, "seed": 5},
}


@pytest.mark.parametrize("options", MEANT.values(), ids=MEANT.keys())
def test_numbers_of_numpy_and_torch_and_dicts_mean_what_they_say(decoder, options):
    """The same text as with Python's own numbers."""
    wanted = decoder.generate([5, 6], temperature=0.5, top_k=5, seed=5, max_new_tokens=6).token_ids
    result = decoder.generate([5, 6], **options)
    assert result.token_ids == wanted
    assert type(result.seed) is int


@pytest.mark.parametrize("end", [np.int64, torch.tensor, lambda own: [np.int64(own)], lambda own: torch.tensor([own])])
def test_an_end_of_sequence_of_any_kind_ends_the_text(decoder, end):
    """A number or a list of them."""
    text = decoder.generate([5, 6], max_new_tokens=8).token_ids
    place = text.index(text[4])
    result = decoder.generate([5, 6], max_new_tokens=8, eos_token_id=end(text[4]))
    assert (result.token_ids, result.finish_reason) == (text[: place + 1], "eos")


def test_one_callable_is_a_list_of_one(decoder):
    """A bare function as processor and as criterion."""
    force = following([7, 8, 9, 10], 2)
    result = decoder.generate(
        [5, 6], max_new_tokens=4, logits_processor=force, stopping_criteria=lambda i, _: i.shape[1] > 4
    )
    assert result.token_ids == [7, 8, 9]
    listed = LogitsProcessorList([force])
    assert decoder.generate([5, 6], max_new_tokens=4, logits_processor=listed).token_ids == [7, 8, 9, 10]


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
def test_a_callable_that_answers_nothing_is_named(decoder, name):
    """A function that forgets its return."""
    with pytest.raises(SamplingError, match="returns"):
        decoder.generate([5], max_new_tokens=3, **{name: lambda ids, scores: None})


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1])
def test_seeds_of_64_bits_are_taken(decoder, seed):
    """Negative ones, too."""
    assert decoder.generate([5], max_new_tokens=2, temperature=1.0, seed=seed).seed == seed


# ---- options row by row ----


def test_options_may_differ_by_row(target, near):
    """Each row of a batch is what it is alone under its own options, greedy ones among sampled ones."""
    decoder = SpeculativeDecoder(target, drafts=[near], tree=BestFirst(6, 3))
    options = {
        "temperature": [0.7, 0, 1.5, 1.0],
        "max_new_tokens": [9, 4, 7, 5],
        "repetition_penalty": [1, 1.3, 1.1, 1],
    }
    batch = decoder.generate(PROMPTS, seed=[1, 2, 3, 4], **options)
    for place, result in enumerate(batch):
        own = {name: values[place] for name, values in options.items()}
        alone = decoder.generate(PROMPTS[place], seed=place + 1, **own)
        assert (result.token_ids, result.seed) == (alone.token_ids, alone.seed)


def test_greedy_rows_among_sampled_ones_are_drafted_for_without_noise(target):
    """A draft that is the target guesses greedy rows as if they were alone."""
    decoder = SpeculativeDecoder(target, drafts=[target], tree=Chain(3))
    batch = decoder.generate([[5, 9], [5, 9]], max_new_tokens=12, temperature=[1.0, 0], seed=3)
    assert [[len(step.tokens) for step in own.steps] for own in batch] == [[4] * 3] * 2


def test_a_list_of_another_length_is_refused(decoder):
    """One value for all, or one per row."""
    with pytest.raises(SamplingError, match=r"temperature.*per row \(2\)"):
        decoder.generate([[5], [6]], temperature=[0.5])


def test_rows_of_sampled_trees_may_differ_in_their_distribution(target, near):
    """Each has the ids that it has alone, a greedy one included."""
    decoder = SpeculativeDecoder(target, drafts=[near], tree=Sampled((2, 1)))
    temperatures, most = [0.5, 0.6, 0], [3, 4, 4]
    batch = decoder.generate([[5], [6], [7]], temperature=temperatures, max_new_tokens=most, seed=1)
    for number, (own, temperature, count) in enumerate(zip(batch, temperatures, most, strict=True)):
        options = {"seed": 1} if temperature else {}
        alone = decoder.generate([5 + number], temperature=temperature, max_new_tokens=count, **options)
        assert len(own.token_ids) == count
        assert own.token_ids == alone.token_ids


# ---- the end of a text ----


@pytest.mark.parametrize(
    ("prompt", "strings", "kept", "cut"),
    [
        ("say ", ["END"], "so then END", "so then "),
        ("say ", ["xx", "then E", "n E"], "so then E", "so "),
        ("say s", ["so t"], "o t", ""),
    ],
)
def test_stop_strings_are_cut_from_the_text_on_request(target, prompt, strings, kept, cut):
    """From where the first one begins, even if in the prompt; the ids stay."""
    tokenizer = byte_tokenizer()
    decoder = SpeculativeDecoder(target, tokenizer, tree=Chain(3))
    full = "say so then END or not"
    force = following(tokenizer(full[len(prompt) :])["input_ids"], len(prompt))
    options = {"stop_strings": strings, "max_new_tokens": 15, "logits_processor": force}
    whole = decoder.generate(prompt, **options)
    short = decoder.generate(prompt, keep_stop_string=False, **options)
    assert (whole.text, short.text) == (kept, cut)
    assert whole.token_ids == short.token_ids


def test_max_time_starts_with_the_run_and_not_when_it_is_opened(decoder, monkeypatch):
    """What the caller does between opening and iterating is the caller's time."""
    now = [0.0]
    monkeypatch.setattr("specinfer.engine.sequence.monotonic", lambda: now[0])
    run = decoder.open([5], max_time=5.0, max_new_tokens=6)
    now[0] = 100.0
    run.finish()
    assert run.results()[0].finish_reason == "length"


# ---- wrong types: one line, before a model runs ----

ODD = [
    "x",
    [],
    ["x"],
    {"a": 1},
    float("nan"),
    float("inf"),
    -3,
    2.5,
    object(),
    np.float32("nan"),
    torch.tensor([1.5, 2.5]),
    torch.tensor(-2),
    b"x",
    10**40,
]
OPTIONS = [
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "max_new_tokens", "max_length"),
    *("min_new_tokens", "min_length", "no_repeat_ngram_size", "max_time", "stop_strings", "do_sample", "eos_token_id"),
    *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id"),
    *("forced_eos_token_id", "exponential_decay_length_penalty", "renormalize_logits", "remove_invalid_values"),
    *("num_beams", "guidance_scale", "generation_config", "logits_processor", "stopping_criteria", "seed", "raw"),
    *("keep_stop_string", "streamer", "attention_mask", "token_type_ids", "position_ids", "epsilon_cutoff", "top_h"),
]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_any_type_works_or_is_refused(decoder, target, name):
    """Nothing but errors of our own, in one line, and none of them after a model has run."""
    with counted(target) as passes:
        for value in ODD:
            message = ""
            passes.clear()
            try:
                decoder.generate([5, 6], **{"max_new_tokens": 2, "eos_token_id": 3, name: value})
            except SpecinferError as error:
                message = str(error)
            assert bool(passes) != bool(message), (value, message)
            assert "\n" not in message


REFUSED = {
    "do_sample text": ({"do_sample": "yes"}, "do_sample"),
    "negative max_time": ({"max_time": -1.0}, "max_time"),
    "nan max_time": ({"max_time": float("nan")}, "max_time"),
    "stop_strings": ({"stop_strings": 5}, "stop_strings"),
    "bad words": ({"bad_words_ids": [[5], [6, 264]]}, "bad_words_ids.*264"),
    "bad words flat": ({"bad_words_ids": [5]}, "bad_words_ids"),
    "bias": ({"sequence_bias": {(5, 300): 1.0}}, "sequence_bias.*300"),
    "nan bias": ({"sequence_bias": {(5,): float("nan")}}, "sequence_bias"),
    "forced": ({"forced_eos_token_id": 264}, "forced_eos_token_id.*264"),
    "forced first": ({"forced_bos_token_id": -1}, "forced_bos_token_id"),
    "suppressed": ({"suppress_tokens": [5, 264]}, "suppress_tokens.*264"),
    "end": ({"eos_token_id": [3, 264]}, "eos_token_id.*264"),
    "a class": ({"logits_processor": LogitsProcessorList}, "logits_processor"),
    "config": ({"generation_config": 5}, "generation_config"),
    "unknown in a dict": ({"generation_config": {"temprature": 1}}, "temprature"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_impossible_options_are_refused_by_name(decoder, target, options, message):
    """Each a SamplingError that names it, before a model runs."""
    with counted(target) as passes, pytest.raises(SamplingError, match=message):
        decoder.generate([5, 6], **options)
    assert not passes


@pytest.mark.parametrize("seed", [10**39, 2**64, -(2**63) - 1, np.float64(5), torch.tensor(5.0), {1: 2}])
def test_seeds_that_are_no_whole_number_of_64_bits_are_refused(decoder, seed):
    """A seed is not taken modulo anything."""
    with pytest.raises(InputError, match="seed"):
        decoder.generate([5], seed=seed, temperature=1.0)


def test_no_end_of_sequence_is_minus_one(decoder):
    """As transformers' own tests write it; impatience acts on no token then."""
    wanted = decoder.generate([5], max_new_tokens=3)
    result = decoder.generate([5], eos_token_id=-1, max_new_tokens=3, exponential_decay_length_penalty=(1, 9.0))
    assert (result.token_ids, result.finish_reason) == (wanted.token_ids, "length")


def test_a_checkpoints_own_ids_may_be_any(near):
    """An end of sequence beyond the vocabulary and an encoder-decoder's default: inherited, and never met."""
    model = tiny_llama(0)
    wanted = SpeculativeDecoder(model, drafts=[near]).generate([5], max_new_tokens=4).token_ids
    model.generation_config.update(eos_token_id=9999, decoder_start_token_id=2)
    decoder = SpeculativeDecoder(model, drafts=[near])
    assert decoder.generate([5], max_new_tokens=4).token_ids == wanted
    with pytest.raises(SamplingError, match="decoder_start_token_id"):
        decoder.generate([5], max_new_tokens=4, decoder_start_token_id=2)


CONSTRUCTED = {
    "no model": ({"model": None}, ModelError, "None is not a model"),
    "a name": ({"model": "gpt2"}, ModelError, "from_pretrained"),
    "a layer": ({"model": torch.nn.Linear(2, 2)}, ModelError, "is not a model"),
    "tokenizer": ({"tokenizer": "gpt2"}, InputError, "tokenizer"),
    "tokenizer class": ({"tokenizer": BatchEncoding}, InputError, "tokenizer"),
    "verifier": ({"verifier": "walk"}, InputError, "verifier"),
    "drafts": ({"drafts": {"a": 1}}, InputError, "draft"),
    "graphs": ({"graphs": "yes"}, InputError, "graphs"),
    "compile": ({"compile": [1]}, InputError, "compile"),
    "gate": ({"confidence_gate": [0.5]}, InputError, "confidence_gate"),
    "tree": ({"tree": [4, 2]}, InputError, "growth policy"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), CONSTRUCTED.values(), ids=CONSTRUCTED.keys())
def test_decoders_are_made_of_what_can_decode(target, arguments, error, message):
    """Every argument of a wrong type is refused by name."""
    with pytest.raises(error, match=message):
        SpeculativeDecoder(**{"model": target, **arguments})


@pytest.mark.parametrize(
    "arguments", [{"target": 5}, {"dtype": 5}, {"dtype": [1]}, {"device": object()}, {"drafts": 5}]
)
def test_names_of_a_wrong_type_are_refused(arguments):
    """`from_pretrained` takes names and folders."""
    with pytest.raises(SpecinferError):
        SpeculativeDecoder.from_pretrained(**{"target": "/no/such/folder", **arguments})


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (Expansion, (5,)),
        (Expansion, ("22",)),
        (Expansion, (None,)),
        (BestFirst, (4, 2, "a")),
        (BestFirst, (4, 2, None)),
    ],
)
def test_policies_of_a_wrong_type_are_refused(policy, sizes):
    """A number where widths are wanted, a word where a probability is."""
    with pytest.raises(PolicyError):
        policy(*sizes)


def test_ends_of_text_are_known(decoder):
    """The tokenizer's own end of sequence is no padding."""
    assert ids(decoder, [[5, EOS_TEXT], [6, 7]]) == [[5, EOS_TEXT], [6, 7]]


COMPARED = {
    "prompts": [None, [None], 5],
    "target": [["x"], b"x"],
    "drafts": [None, [1]],
    "methods": [None, [[1]]],
    "temperatures": [None, "x", [float("nan")], [True]],
    "nodes": [None, "x", 1.5, float("nan"), 10**40],
    "max_new_tokens": [None, "x", True],
    "out": [5, []],
    "hits": ["yes", object()],
}


@pytest.mark.parametrize("name", COMPARED)
def test_what_compare_cannot_use_is_refused(name):
    """Every argument of a wrong type, before a model is looked for."""
    for value in COMPARED[name]:
        with pytest.raises(InputError, match=name.rstrip("s")):
            compare(**{"prompts": "hi", "target": "/no/such/folder", name: value})


RECORDED = {
    "decoder": [None, 5],
    "max_new_tokens": [None, "x", 1, 1.5],
    "temperature": [None, "x", float("nan"), -1],
    "seed": [2.5, 10**40, "x"],
    "nodes": [None, -1, 10**40],
    "depth": [None, 0],
    "top": ["x", 0, 10**40],
    "batch": [None, 0],
    "out": [5, []],
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_record_cannot_use_is_refused(decoder, target, near, name):
    """Every argument of a wrong type, before a model runs."""
    recorder = SpeculativeDecoder(target, drafts=[near], tree=BestFirst(4, 2))
    with counted(target, near) as passes:
        for value in RECORDED[name]:
            with pytest.raises(InputError, match=name):
                record(**{"decoder": recorder, "prompts": [5, 6], "max_new_tokens": 3, name: value})
    assert not passes


def test_record_takes_what_tokenizers_return_and_numbers_of_numpy(target, near):
    """Padding is taken out; a trace can be written."""
    recorder = SpeculativeDecoder(target, byte_tokenizer(), drafts=[near], tree=BestFirst(4, 2))
    inputs = byte_tokenizer(padding_side="left")(["hello", "hi"], padding=True, return_tensors="pt")
    trace = record(recorder, inputs, max_new_tokens=np.int64(3), nodes=np.int64(4), depth=torch.tensor(2))
    assert [text.prompt_ids for text in trace.texts] == [byte_tokenizer()(own)["input_ids"] for own in ("hello", "hi")]
    for wrong in ({"trace": None}, {"policy": None}, {"verifier": "x"}, {"drafts": 5}, {"coupled": "x"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            replay(**{"trace": trace, "policy": BestFirst(4, 2), **wrong})
