"""Tools and reasoning: what templates are told, and what transformers' parser reads out of a text."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import Live, live, made_decoder

from specinfer import SpeculativeDecoder
from specinfer.common.chat import ChatOptions
from specinfer.serve.protocol import ApiError
from specinfer.serve.tools import Deltas, Forced, Form

CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}'
ANSWER = f"<think>hm</think>Yes.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ASKED: Any = [{"role": "user", "content": "Add."}]
WRITTEN = {  # as in transformers' own for Qwen
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}


WRITE = """{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{% for message in messages %}
{{- message['role'] }}:{{ message['content'] }}{% for call in message['tool_calls'] %}CALL{% endfor %}<eos>{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
CALL_WRITTEN = (
    """<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}"""
)
CALL_WRITTEN += "{{ '</tool_call>' }}"


def reading(template: str, **options: Any) -> SpeculativeDecoder:
    """A decoder with this chat template whose responses are read."""
    made = made_decoder(chat_template=template, **options)
    if not hasattr(made.tokenizer, "get_response_parser"):
        pytest.skip("this transformers reads no responses")
    made.tokenizer.response_template = WRITTEN
    return made


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return reading(WRITE.replace("CALL", CALL_WRITTEN))


@pytest.fixture
def server(decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """The model writes the answer, whatever it is asked."""
    prepare, ids = decoder.prepare, decoder.tokenizer(ANSWER)["input_ids"]

    def scripted(prompt: list[int], **options: Any) -> Any:
        return prepare(prompt, **{**options, "logits_processor": [Script(ids, len(prompt))], "temperature": 0})

    monkeypatch.setattr(decoder, "prepare", scripted)
    with live(decoder) as running:
        yield running


class Script:
    """A processor that forces a script, and then the end."""

    def __init__(self, ids: list[int], start: int) -> None:
        self.ids, self.start = [*ids, 256], start

    def __call__(self, ids: Any, scores: Any) -> Any:
        """Leave one token."""
        forced = scores.new_full(scores.shape, -float("inf"))
        forced[:, self.ids[min(ids.shape[1] - self.start, len(self.ids) - 1)]] = 0
        return forced


def checked(message: Any, reason: str) -> None:
    assert message.content == "Yes."
    assert message.reasoning_content == "hm"
    assert reason == "tool_calls"
    first, second = message.tool_calls
    assert first.id != second.id
    for call in (first, second):
        assert (call.type, call.function.name) == ("function", "add")
        assert json.loads(call.function.arguments) == json.loads(CALL)["arguments"]


def test_calls_of_tools_are_read(server: Live) -> None:
    answer = server.client().chat.completions.create(model="tiny", messages=ASKED, tools=TOOLS, temperature=0)
    assert ChatCompletion.model_validate(answer.model_dump(), strict=True)
    checked(answer.choices[0].message, answer.choices[0].finish_reason)


def test_one_call_is_told_if_several_are_not_wanted(server: Live) -> None:
    message = server.client().chat.completions.create(
        model="tiny", messages=ASKED, tools=TOOLS, temperature=0, parallel_tool_calls=False
    )
    assert len(message.choices[0].message.tool_calls) == 1


def test_calls_of_tools_are_streamed(server: Live) -> None:
    client = server.client()
    with client.chat.completions.stream(model="tiny", messages=ASKED, tools=TOOLS, temperature=0) as events:
        for event in events:
            if event.type == "chunk":
                ChatCompletionChunk.model_validate(event.chunk.model_dump(), strict=True)
        found = events.get_final_completion().choices[0]
    checked(found.message, found.finish_reason)


def test_a_stream_has_the_log_probabilities_of_all_tokens(server: Live, decoder: SpeculativeDecoder) -> None:
    """Also of those whose text is no part of the message, such as the marks around a call."""
    asked: Any = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "temperature": 0, "logprobs": True}
    create = server.client().chat.completions.create
    whole = create(**asked).choices[0].logprobs.content
    streamed = [chunk.choices[0].logprobs for chunk in create(stream=True, **asked)]
    assert [token for told in streamed if told for token in told.content] == whole
    assert len(whole) == len(decoder.tokenizer(ANSWER)["input_ids"]) + 1


def test_the_template_is_told_of_tools_and_of_earlier_calls(server: Live) -> None:
    client = server.client()

    def length(**options: Any) -> int:
        return client.chat.completions.create(
            **{"model": "tiny", "messages": ASKED, "max_tokens": 1, **options}
        ).usage.prompt_tokens

    assert length(tools=TOOLS) - length() == len("add;")
    assert length(tools=TOOLS, tool_choice="none") == length()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    told = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    assert length(messages=told) > length()
    call["function"] = {"name": "add", "arguments": "{"}
    with pytest.raises(openai.BadRequestError, match="are not JSON"):
        length(messages=told)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_parts_do_not_depend_on_how_a_text_is_cut(decoder: SpeculativeDecoder, size: int) -> None:
    deltas = Deltas(decoder.tokenizer.get_response_parser(WRITTEN, prefix=""))
    pieces = [ANSWER[begin : begin + size] for begin in range(0, len(ANSWER), size)]
    parts = [part for number, piece in enumerate(pieces) for part in deltas.of(piece, number == len(pieces) - 1)]
    said = {name: "".join(part.get(name, "") for part in parts) for name in ("content", "reasoning_content")}
    assert said == {"content": "Yes.", "reasoning_content": "hm"}
    assert [part["tool_calls"][0]["index"] for part in parts if "tool_calls" in part] == [0, 1]
    assert deltas.calls == 2


NO_CALLS = ["{bad</tool_call> more", '{"name": "ad', "[1]</tool_call>", '{"name": 5}</tool_call>']


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_is_no_call_is_content(decoder: SpeculativeDecoder, size: int, text: str) -> None:
    """And so is one that was cut, as it was written; what stands before it is what it would be."""
    whole = f"<think>hm</think><tool_call>{CALL}</tool_call>Yes.<tool_call>{text}"
    deltas = Deltas(decoder.tokenizer.get_response_parser(WRITTEN, prefix=""))
    pieces = [whole[begin : begin + size] for begin in range(0, len(whole), size)]
    parts = [part for number, piece in enumerate(pieces) for part in deltas.of(piece, number == len(pieces) - 1)]
    assert "".join(part.get("content", "") for part in parts) == f"Yes.<tool_call>{text}"
    assert "".join(part.get("reasoning_content", "") for part in parts) == "hm"
    assert deltas.calls == 1


@pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": {}'])
def test_a_call_without_arguments_has_none(decoder: SpeculativeDecoder, arguments: str) -> None:
    deltas = Deltas(decoder.tokenizer.get_response_parser(WRITTEN, prefix=""))
    (part,) = deltas.of(f'<tool_call>{{"name": "now"{arguments}}}</tool_call>', ended=True)
    assert part["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


ADD: Any = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "ü"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BOTH: Any = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "say.it"}},
]
NAMED: Any = {"type": "function", "function": {"name": "add"}}
SAMPLED: dict[str, Any] = {"model": "tiny", "messages": ASKED, "tools": BOTH, "temperature": 1.5, "max_tokens": 400}
SAMPLED["logit_bias"] = {"256": 3}  # or there are many calls


@pytest.fixture(scope="module")
def forcing(decoder: SpeculativeDecoder) -> Iterator[Live]:
    pytest.importorskip("llguidance")
    with live(decoder) as running:
        yield running


def called(answer: Any) -> list[tuple[str, Any]]:
    """Return the calls of a message, checked against the schemas."""
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls]
    for name, arguments in calls:
        jsonschema.validate(arguments, {"add": ADD, "say.it": {"maxProperties": 0}}[name])
    assert not answer.message.content
    return calls


def test_forced_calls_are_of_the_tools_and_their_schemas(forcing: Live) -> None:
    """One or several of any function; one of that which is named, or if several are not wanted."""
    create, counts, names = forcing.client().chat.completions.create, set(), set()
    for seed in range(5):
        choice = create(tool_choice="required", seed=seed, **SAMPLED).choices[0]
        calls = called(choice)
        assert choice.finish_reason == "tool_calls"
        counts.add(min(len(calls), 2))
        names |= {name for name, _ in calls}
        assert (
            len(called(create(tool_choice="required", seed=seed, parallel_tool_calls=False, **SAMPLED).choices[0])) == 1
        )
        choice = create(tool_choice=NAMED, seed=seed, **SAMPLED).choices[0]
        assert ([name for name, _ in called(choice)], choice.finish_reason) == (["add"], "stop")
    assert (counts, names) == ({1, 2}, {"add", "say.it"})


def test_forced_calls_are_the_same_with_and_without_speculation(forcing: Live, decoder: SpeculativeDecoder) -> None:
    """And in a stream; speculation saves passes."""
    plain = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, [], None, compile=False)
    passes = [0, 0]
    with live(plain) as other:
        for seed in range(4):
            asked = {"tool_choice": "required", "seed": seed, **SAMPLED}
            answers = [each.client().chat.completions.create(**asked) for each in (forcing, other)]
            with forcing.client().chat.completions.stream(**asked) as events:
                for _ in events:
                    pass
            streamed = events.get_final_completion().choices[0]
            ours, theirs = (called(answer.choices[0]) for answer in answers)
            assert ours == theirs == called(streamed)
            assert answers[0].usage.completion_tokens == answers[1].usage.completion_tokens
            for number, answer in enumerate(answers):
                passes[number] += answer.usage.completion_tokens_details.speculation["target_passes"]
    assert passes[0] < passes[1] / 2


def test_a_forced_call_that_is_cut_says_so(forcing: Live) -> None:
    choice = forcing.client().chat.completions.create(tool_choice=NAMED, **{**SAMPLED, "max_tokens": 20}).choices[0]
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls


def with_function(**changed: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **changed}}]}


UNIQUE = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": []}, "tool_choice", "no tool to be called"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "no tool to be called"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice", "Invalid enum value"),
    ({"tool_choice": "any"}, "tool_choice", "tool_choice"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "tools: "),
    (with_function(name='a"b'), "tools", "not a function's name"),
    (with_function(parameters={"type": "object", "properties": {"a": {"type": "what"}}}), "tools", "what"),
    (with_function(parameters={"default": "\0"}), "tools", "NUL"),
    (with_function(parameters=UNIQUE, strict=True), "tools", "uniqueItems"),
]


@pytest.mark.parametrize(("options", "param", "words"), REFUSED, ids=[str(options)[:40] for options, _, _ in REFUSED])
def test_calls_that_cannot_be_forced_are_refused_by_name(
    forcing: Live, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        forcing.client().chat.completions.create(**{**SAMPLED, "tool_choice": "required", **options})
    assert (error.value.param, words in error.value.message) == (param, True), error.value


def test_keywords_that_cannot_be_followed_are_ignored_unless_strict(forcing: Live) -> None:
    asked = {**SAMPLED, **with_function(parameters=UNIQUE | {"required": ["a"]}), "temperature": 0, "max_tokens": 30}
    assert forcing.client().chat.completions.create(**asked, tool_choice="required").usage.completion_tokens == 30


FORM = Form('<tool_call>{"name": "', '", "arguments": ', "}</tool_call>", '}</tool_call><tool_call>{"name": "')
ALONE = "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call alone') }}{% endif %}"
ASIDE = "{% if loop.first %}<think></think>{% endif %}"
FORMS: dict[str, tuple[str, Form | None]] = {
    "several": (CALL_WRITTEN, FORM),
    "one alone": (ALONE + CALL_WRITTEN, FORM._replace(between=None)),
    "no thoughts": (ASIDE + CALL_WRITTEN, FORM._replace(before="<think></think>" + FORM.before)),
    "arguments in a string": (CALL_WRITTEN.replace("arguments | tojson", "arguments | tojson | tojson"), None),
    "another name": (CALL_WRITTEN.replace("function.name", "id"), None),
    "arguments twice": (CALL_WRITTEN + "{{ call.function.arguments | tojson }}", None),
    "never": ("{{ raise_exception('no calls') }}", None),
    "unread": ("", None),
}


@pytest.mark.parametrize("name", FORMS)
def test_how_calls_are_written_is_taken_from_the_template(name: str) -> None:
    written, wanted = FORMS[name]
    decoder = reading(WRITE.replace("CALL", written))
    forced = Forced(decoder, WRITTEN, ChatOptions())
    assert forced.form == wanted
    if wanted is None:
        with pytest.raises(ApiError, match="does not show how it writes calls"):
            forced.grammar([], True)
