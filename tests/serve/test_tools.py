"""Tools and reasoning: what templates are told, and what transformers' parser reads out of a text."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serving import TEMPLATE, Live, live, made_decoder

from specinfer import SpeculativeDecoder
from specinfer.serve.chat import Deltas

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


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    template = TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}"
    made = made_decoder(chat_template=template)
    if not hasattr(made.tokenizer, "get_response_parser"):
        pytest.skip("this transformers reads no responses")
    made.tokenizer.response_template = WRITTEN
    return made


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


def test_calls_of_tools_are_streamed(server: Live) -> None:
    client = server.client()
    with client.chat.completions.stream(model="tiny", messages=ASKED, tools=TOOLS, temperature=0) as events:
        for event in events:
            if event.type == "chunk":
                ChatCompletionChunk.model_validate(event.chunk.model_dump(), strict=True)
        found = events.get_final_completion().choices[0]
    checked(found.message, found.finish_reason)


def test_the_template_is_told_of_tools_and_of_earlier_calls(server: Live) -> None:
    client = server.client()

    def length(**options: Any) -> int:
        return client.chat.completions.create(
            **{"model": "tiny", "messages": ASKED, "max_tokens": 1, **options}
        ).usage.prompt_tokens

    assert length(tools=TOOLS) - length() == len(json.dumps(TOOLS))
    assert length(tools=TOOLS, tool_choice="none") == length()
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    told = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    assert length(messages=told) > length()
    call["function"] = {"name": "add", "arguments": "{"}
    with pytest.raises(openai.BadRequestError, match="are no JSON"):
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


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("text", ["{bad</tool_call> more", '{"name": "ad', "[1]</tool_call>"])
def test_what_is_no_call_is_content(decoder: SpeculativeDecoder, size: int, text: str) -> None:
    """And so is one that was cut."""
    whole = f"Yes.<tool_call>{text}"
    deltas = Deltas(decoder.tokenizer.get_response_parser(WRITTEN, prefix=""))
    pieces = [whole[begin : begin + size] for begin in range(0, len(whole), size)]
    parts = [part for number, piece in enumerate(pieces) for part in deltas.of(piece, number == len(pieces) - 1)]
    said = "".join(part["content"] for part in parts)
    assert said.startswith("Yes.")
    assert text.removesuffix("</tool_call>").removesuffix("</tool_call> more") in said
    assert said.endswith("more") == text.endswith("more")
    assert not deltas.calls
