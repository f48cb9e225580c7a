"""Prompts through chat templates: begun answers, options of templates, contents in parts, texts that are templated."""

import json

import pytest
import torch
from conftest import byte_tokenizer
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from specinfer import SpeculativeDecoder
from specinfer.batch import generate_files, read_prompts
from specinfer.errors import InputError, SamplingError
from specinfer.prompts import encode

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|u|>' if m['role'] == 'user' else '<|a|>' }}{{ m['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
)
READS = (  # one that takes parts, tools, and a switch for thinking
    "{{ bos_token }}{% if tools %}[{% for t in tools %}{{ t['function']['name'] }},{% endfor %}]{% endif %}"
    "{% for m in messages %}<|u|>{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
    "{{ style }}{% endif %}"
)
USER, BEGUN = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "According to"}


def chat_tokenizer(template=TEMPLATE, adds_bos=True):
    """Return a byte-level tokenizer with roles' tokens, which adds a BOS or does not."""
    tokenizer = byte_tokenizer(bos_token="<s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|u|>", "<|a|>"]})
    if adds_bos:
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def decoder():
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    return SpeculativeDecoder(LlamaForCausalLM(config).eval(), tokenizer, ["ngram"], compile=False)


def text_of(prompt, template=TEMPLATE, **options):
    """The text that a prompt becomes."""
    tokenizer = chat_tokenizer(template)
    decoder_options = {name: options.pop(name) for name in ("raw",) if name in options}
    from specinfer.common.chat import ChatOptions

    return tokenizer.decode(encode(prompt, tokenizer, chat=ChatOptions(**options), **decoder_options).only)


# ---- begun answers ----


@pytest.mark.parametrize("way", ["generate", "list", "stream", "many", "score"])
def test_a_begun_answer_is_continued_everywhere(decoder, way):
    """As transformers' pipeline does: no turn is closed, none begun."""
    wanted = decoder.tokenizer("<s><|u|>hi<eos><|a|>According to", add_special_tokens=False)["input_ids"]
    messages, options = [USER, BEGUN], {"max_new_tokens": 1, "temperature": 0}
    if way == "score":
        assert decoder.score(messages, "x").total == decoder.score(wanted, "x").total
        return
    if way == "generate":
        result = decoder.generate(messages, **options)
    elif way == "list":
        _, result = decoder.generate([[USER], messages], **options)
    elif way == "stream":
        stream = decoder.stream(messages, **options)
        list(stream)
        result = stream.result
    else:
        ((_, result, _),) = decoder.generate_many([messages], **options)
    assert result.prompt_ids == wanted


@pytest.mark.parametrize(
    ("messages", "options", "wanted"),
    [
        ([USER, BEGUN], {"add_generation_prompt": True}, "<s><|u|>hi<eos><|a|>According to<eos><|a|>"),
        ([USER, BEGUN], {"continue_final_message": False}, "<s><|u|>hi<eos><|a|>According to<eos><|a|>"),
        ([USER, BEGUN], {"continue_final_message": True}, "<s><|u|>hi<eos><|a|>According to"),
        ([USER], {"continue_final_message": True}, "<s><|u|>hi"),
        ([USER], {"add_generation_prompt": False}, "<s><|u|>hi<eos>"),
        ([USER, {"role": "assistant", "content": ""}], {}, "<s><|u|>hi<eos><|a|>"),
        ([USER, {**BEGUN, "content": [{"type": "text", "text": "Well, "}]}], {}, "<s><|u|>hi<eos><|a|>Well, "),
        ("hi", {"add_generation_prompt": False}, "<s><|u|>hi<eos>"),
    ],
)
def test_how_a_prompt_ends_may_be_said(messages, options, wanted):
    assert text_of(messages, **options) == wanted


# ---- options of templates ----


def search(query: str) -> str:
    """Search.

    Args:
        query: what for.
    """
    return query


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"tools": [TOOL]}, "<s>[look_up,]<|u|>hi<eos><|a|>"),
        ({"tools": [search]}, "<s>[search,]<|u|>hi<eos><|a|>"),
        ({"tools": []}, "<s><|u|>hi<eos><|a|>"),
        ({"enable_thinking": False}, "<s><|u|>hi<eos><|a|>-"),
        ({"enable_thinking": True}, "<s><|u|>hi<eos><|a|>"),
        ({"chat_template_kwargs": {"style": "short"}}, "<s><|u|>hi<eos><|a|>short"),
    ],
)
def test_a_template_gets_its_variables(options, wanted):
    assert text_of([USER], READS, **options) == wanted


def test_options_go_through_calls_and_files(decoder, tmp_path):
    """As options of one of many prompts, and of a line of a file."""
    options = {"max_new_tokens": 1, "temperature": 0}
    asked = [{"prompt": [USER], "add_generation_prompt": False}, [USER]]
    ids = [len(result.prompt_ids) for _, result, _ in sorted(decoder.generate_many(asked, **options))]
    assert ids[0] == ids[1] - 1
    line = {"prompt": [USER, BEGUN], "options": {"continue_final_message": False}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(line))
    generate_files(decoder, read_prompts([tmp_path / "prompts.jsonl"]), tmp_path / "out", **options)
    record = json.loads((tmp_path / "out" / "records.jsonl").read_text())
    assert record["prompt_tokens"] == len("hiAccording to") + 6


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        ([USER], {"tools": [TOOL]}, "does not read tools"),
        ([USER], {"enable_thinking": False}, "does not read enable_thinking"),
        ([USER], {"chat_template_kwargs": {"style": "short"}}, "does not read style"),
        ([USER], {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs holds tools"),
        ([USER], {"chat_template_kwargs": [1]}, "not a dict"),
        ([USER], {"tools": TOOL}, "tools=.* is not a list"),
        ([USER], {"add_generation_prompt": 1}, "neither True nor False"),
        ([USER, BEGUN], {"add_generation_prompt": True, "continue_final_message": True}, "continues the last"),
        ([USER, {"role": "assistant", "content": None}], {"continue_final_message": True}, "has no"),
        ([5, 6], {"tools": [TOOL]}, "tools is of chat messages, and the prompt is token ids"),
        ("hi", {"raw": True, "enable_thinking": True}, "no chat template is applied to"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "'image_url', and the target"),
        ([{"role": "user", "content": ["hi"]}], {}, "'str', and the target reads text only"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "reads text only"),
    ],
)
def test_what_would_be_dropped_is_refused_by_name(decoder, prompt, options, reason):
    """Before any model runs, in one call and among many."""
    with pytest.raises(InputError, match=reason):
        decoder.generate(prompt, max_new_tokens=1, **options)
    ((_, result, error),) = decoder.generate_many([{"prompt": prompt, **options}], max_new_tokens=1)
    assert result is None
    with pytest.raises(InputError, match=reason):
        raise error


def test_misspelt_options_of_templates_are_named(decoder):
    with pytest.raises(SamplingError, match="did you mean enable_thinking"):
        decoder.generate([USER], enable_thinkin=True)
    with pytest.raises(InputError, match="did you mean tools"):
        decoder.score([USER], "x", tool=[TOOL])


# ---- contents in parts ----

PARTS = [{"type": "text", "text": "a "}, {"type": "input_text", "text": "b"}]


@pytest.mark.parametrize("template", [TEMPLATE, READS, TEMPLATE.replace("m['content']", "'' + m['content']")])
def test_contents_in_parts_are_text(template):
    """Whether the template takes parts, writes them out as they look, or fails on them."""
    assert text_of([{"role": "user", "content": PARTS}], template) == "<s><|u|>a b<eos><|a|>"


# ---- templated texts ----


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("raw", [False, True])
def test_a_templated_text_is_what_its_messages_are(adds_bos, raw):
    """One BOS, and no template within a template."""
    tokenizer = chat_tokenizer(adds_bos=adds_bos)
    right = tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    text = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    prompts = encode([text, [USER]], tokenizer, raw=raw)
    assert prompts.rows == [right, right]
    assert bool(prompts.notes[0]) is not raw
    assert not prompts.notes[1]


def test_a_note_says_that_a_text_was_taken_for_templated(decoder):
    text = decoder.tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    templated, message = decoder.generate([text, "hi"], max_new_tokens=1, temperature=0)
    assert "the prompt begins with <s>, as the chat template does, so it is fed as it is" in templated.stats.notes
    assert not any("begins with" in note for note in message.stats.notes)
    assert templated.prompt_ids == message.prompt_ids


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("hi", ["<s>", "h", "i"]),
        ("<s>hi", ["<s>", "h", "i"]),
        ("<s><s>hi", ["<s>", "<s>", "h", "i"]),  # it was written twice
        ("h<s>i", ["<s>", "h", "<s>", "i"]),
        ("<|u|>hi", ["<s>", "<|u|>", "h", "i"]),  # another special token than the template begins with
    ],
)
def test_a_raw_text_has_the_bos_that_it_says(text, wanted):
    tokenizer = chat_tokenizer()
    assert tokenizer.convert_ids_to_tokens(encode(text, tokenizer, raw=True).only) == wanted


def test_a_bos_without_characters_stands_nowhere():
    """To look for how often a text begins with it would never end."""
    tokenizer = chat_tokenizer()
    wanted = encode("hi", tokenizer, raw=True).only
    tokenizer.bos_token = ""
    assert encode("hi", tokenizer, raw=True).only[-2:] == wanted[-2:]


def test_messages_that_quote_special_tokens_stay_messages():
    """A string that begins otherwise is a user's message."""
    assert text_of("what is <s>?") == "<s><|u|>what is <s>?<eos><|a|>"
    assert text_of("<|a|>") == "<s><|u|><|a|><eos><|a|>"
