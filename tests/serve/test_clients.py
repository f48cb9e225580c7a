"""OpenAI's own client, over real sockets: what it asks for, and what its types say of the answers."""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel
from serving import CONTEXT, HELLO, Live, live, made_decoder

from specinfer import SpeculativeDecoder
from specinfer.engine.penalties import FrequencyPenalty, PresencePenalty

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 24}
OURS: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_new_tokens": 24, "top_k": 0}


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return made_decoder()


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[Live]:
    with live(decoder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return server.client()


def chat(client: openai.OpenAI, **options: Any) -> Any:
    """Ask for a message; check it against the client's types."""
    answer = client.chat.completions.create(model="tiny", messages=HELLO, **options)
    assert ChatCompletion.model_validate(answer.model_dump(), strict=True)
    return answer


def streamed(client: openai.OpenAI, **options: Any) -> list[Any]:
    """Ask for a stream of a message; check every chunk."""
    chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True, **options))
    for chunk in chunks:
        assert ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    return chunks


def text_of(chunks: list[Any], index: int = 0) -> str:
    parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(choice.delta.content or "" for choice in parts)


def test_a_message_is_what_the_decoder_writes(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    wanted = decoder.generate(HELLO, **OURS)
    answer = chat(client, **SAMPLED)
    (choice,) = answer.choices
    assert choice.message.content == wanted.text
    assert (choice.finish_reason, choice.seed) == ("length", 7)
    assert answer.usage.prompt_tokens == len(wanted.prompt_ids)
    assert answer.usage.completion_tokens == len(wanted.token_ids) == 24
    did = answer.usage.completion_tokens_details.speculation
    assert did["target_passes"] == wanted.stats.target_passes
    assert did["tokens_per_pass"] == pytest.approx(wanted.stats.tokens_per_target_pass, abs=1e-3)
    assert did["accepted_by_draft"] == {each.draft: each.tokens for each in wanted.stats.drafts if each.tokens}


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    chat(client, **SAMPLED)  # both of the next ones find its prompt
    answer, chunks = chat(client, **SAMPLED), streamed(client, stream_options={"include_usage": True}, **SAMPLED)
    assert text_of(chunks) == answer.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.model_dump() == answer.usage.model_dump()
    assert not any(chunk.usage for chunk in streamed(client, **SAMPLED))


def test_the_clients_helper_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=HELLO, n=2, logprobs=True, **SAMPLED) as events:
        for _ in events:
            pass
        found = events.current_completion_snapshot  # the final one is refused for texts that were cut
    wanted = chat(client, n=2, logprobs=True, **SAMPLED)
    for ours, theirs in zip(found.choices, wanted.choices, strict=True):
        assert ours.message.content == theirs.message.content
        assert [t.token for t in ours.logprobs.content] == [t.token for t in theirs.logprobs.content]


def test_several_texts_have_seeds_that_count_up(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    answer, chunks = chat(client, n=3, **SAMPLED), streamed(client, n=3, **SAMPLED)
    for index, choice in enumerate(answer.choices):
        wanted = decoder.generate(HELLO, **{**OURS, "seed": 7 + index}).text
        assert (choice.index, choice.seed) == (index, 7 + index)
        assert choice.message.content == wanted == text_of(chunks, index)


def test_a_drawn_seed_repeats_its_text(client: openai.OpenAI) -> None:
    first = chat(client, max_tokens=16, temperature=1.3).choices[0]
    other = chat(client, max_tokens=16, temperature=1.3).choices[0]
    assert first.seed != other.seed
    assert chat(client, max_tokens=16, temperature=1.3, seed=first.seed).choices[0].message == first.message


def test_greedy_texts_have_no_seed(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    choice = chat(client, temperature=0, top_p=0.5, max_completion_tokens=12, max_tokens=3).choices[0]
    assert choice.message.content == decoder.generate(HELLO, max_new_tokens=12, temperature=0).text
    assert choice.seed is None


def test_a_text_is_as_long_as_the_context_allows(client: openai.OpenAI) -> None:
    usage = chat(client, temperature=0, extra_body={"ignore_eos": True}).usage
    assert usage.total_tokens == CONTEXT


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_ends_before_a_stop_string(client: openai.OpenAI, decoder: SpeculativeDecoder, stream: bool) -> None:
    """Wherever it is cut into tokens, and whatever follows it in the same step."""
    whole = decoder.generate(HELLO, **OURS).text
    stops = [stop for begin in range(1, len(whole) - 2) if "\ufffd" not in (stop := whole[begin : begin + 2])]
    assert len(stops) > 4
    for stop in stops:
        wanted = decoder.generate(HELLO, stop_strings=[stop], keep_stop_string=False, **OURS)
        assert wanted.text == whole[: whole.index(stop)]
        if stream:
            chunks = streamed(client, stop=[stop, "never"], **SAMPLED)
            found, reason = text_of(chunks), chunks[-1].choices[0].finish_reason
        else:
            answer = chat(client, stop=[stop, "never"], **SAMPLED)
            found, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert answer.usage.completion_tokens == len(wanted.token_ids)
        assert (found, reason) == (wanted.text, "stop")


def test_a_stop_string_does_not_begin_in_the_prompt(client: openai.OpenAI) -> None:
    plain = client.completions.create(model="tiny", prompt="ab", max_tokens=3, temperature=0).choices[0].text
    found = client.completions.create(model="tiny", prompt="ab", max_tokens=3, temperature=0, stop="b" + plain[0])
    assert found.choices[0].text == plain


def test_log_probabilities_are_the_decoders(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    wanted = decoder.generate(HELLO, logprobs=3, **OURS)
    content = chat(client, logprobs=True, top_logprobs=3, **SAMPLED).choices[0].logprobs.content
    assert [token.logprob for token in content] == pytest.approx(wanted.logprobs)
    for token, top in zip(content, wanted.top_logprobs or (), strict=True):
        assert [each.logprob for each in token.top_logprobs] == pytest.approx([value for _, value in top])
    text = b"".join(bytes(token.bytes or ()) for token in content).decode(errors="replace")
    assert all(token.top_logprobs == [] for token in chat(client, logprobs=True, **SAMPLED).choices[0].logprobs.content)
    assert [c for c in text if c.isalnum() and c.isascii()] == [c for c in wanted.text if c.isalnum() and c.isascii()]
    chunks = streamed(client, logprobs=True, top_logprobs=3, **SAMPLED)
    told = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert told == content


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_p": 0.2}, {"top_p": 0.2}),
    ({"presence_penalty": 2}, {"logits_processor": lambda start: [PresencePenalty(2, start)]}),
    ({"frequency_penalty": -2}, {"logits_processor": lambda start: [FrequencyPenalty(-2, start)]}),
    ({"logit_bias": {"65": 9, "66": -100}}, {"sequence_bias": {(65,): 9.0, (66,): -100.0}}),
    ({"extra_body": {"top_k": 3}}, {"top_k": 3}),
    ({"extra_body": {"top_k": -1, "min_p": 0.5}}, {"min_p": 0.5}),
    ({"extra_body": {"repetition_penalty": 1.8}}, {"repetition_penalty": 1.8}),
]


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS, ids=[str(theirs) for theirs, _ in OPTIONS])
def test_options_reach_the_engine(
    client: openai.OpenAI, decoder: SpeculativeDecoder, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    plain = decoder.generate(HELLO, **OURS)
    if make := ours.get("logits_processor"):
        ours = {"logits_processor": make(len(plain.prompt_ids))}
    wanted = decoder.generate(HELLO, **{**OURS, **ours}).text
    assert chat(client, **SAMPLED, **theirs).choices[0].message.content == wanted != plain.text


def test_a_prediction_saves_passes_and_changes_nothing(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="tiny", messages=HELLO, **SAMPLED)
    said: Any = plain.choices[0].message.content
    for content in (said, [{"type": "text", "text": said[:9]}, {"type": "text", "text": said[9:]}]):
        found = chat(client, prediction={"type": "content", "content": content}, **SAMPLED)
        assert found.choices[0].message == plain.choices[0].message
        passes = [a.usage.completion_tokens_details.speculation["target_passes"] for a in (found, plain)]
        assert passes[0] < passes[1]


class Pair(BaseModel):
    """What is asked for."""

    name: Literal["a", "b"]
    good: bool


def test_a_schema_is_followed(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    """As the client's helper asks for it, and whole or streamed."""
    found = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Pair, temperature=0.9, seed=7)
    assert isinstance(found.choices[0].message.parsed, Pair)
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Pair, temperature=0.9, seed=7
    ) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.parsed == found.choices[0].message.parsed
    answer = chat(client, response_format={"type": "json_object"}, temperature=0, max_tokens=40)
    assert answer.choices[0].message.content.startswith("{")


def test_roles_and_parts_of_contents(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    told: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="tiny", messages=told, **SAMPLED)
    wanted = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert answer.choices[0].message.content == decoder.generate(wanted, **OURS).text


def test_completions_of_texts_and_ids(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    first, second = decoder.tokenizer(["ab", "hello"])["input_ids"]
    for prompt in ("ab", ["ab", "hello"], first, [first, second]):
        answer = client.completions.create(model="tiny", prompt=prompt, **SAMPLED)
        assert Completion.model_validate(answer.model_dump(), strict=True)
        texts = ["ab", "hello"][: len(answer.choices)]
        wanted = [decoder.generate(text, raw=True, **OURS).text for text in texts]
        assert [choice.text for choice in answer.choices] == wanted
        chunks = list(client.completions.create(model="tiny", prompt=prompt, stream=True, **SAMPLED))
        for index, text in enumerate(wanted):
            parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
            assert "".join(choice.text for choice in parts) == text
            assert parts[-1].finish_reason == "length"


@pytest.mark.parametrize("new", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_log_likelihoods_as_harnesses_ask(
    client: openai.OpenAI, decoder: SpeculativeDecoder, stream: bool, new: int
) -> None:
    """The prompts come back with the log-probability of each token but the first, and the best one beside it."""
    texts = ["Hello there", "x", "The end."]
    prompts = decoder.tokenizer(texts)["input_ids"]
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": new, "echo": True, "logprobs": 1, "temperature": 0}
    answer = client.completions.create(model="tiny", stream=stream, **asked)
    pieces = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    for index, prompt in enumerate(prompts):
        mine = [piece for piece in pieces if piece.index == index]
        kept = [piece.logprobs for piece in mine if piece.logprobs]
        values, tops, offsets, tokens = (
            [value for part in kept for value in getattr(part, name)]
            for name in ("token_logprobs", "top_logprobs", "text_offset", "tokens")
        )
        assert len(values) == len(tops) == len(prompt) + new
        assert new or mine[-1].finish_reason == "length"
        assert (values[0], tops[0]) == (None, None)
        assert offsets == [sum(map(len, tokens[:number])) for number in range(len(tokens))]
        assert "".join(piece.text for piece in mine).startswith(texts[index])
        if len(prompt) > 1:
            score = decoder.score(prompt[:1], prompt[1:])
            assert values[1 : len(prompt)] == pytest.approx(score.log_probabilities, abs=1e-4)
            best = [value == max(top.values()) for value, top in list(zip(values, tops, strict=True))[1 : len(prompt)]]
            assert best == score.greedy


def test_echo_alone_gives_the_prompt_back(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    answer = client.completions.create(model="tiny", prompt="ab", echo=True, **SAMPLED).choices[0]
    assert answer.text == "ab" + decoder.generate("ab", raw=True, **OURS).text
    assert answer.logprobs is None


ASKED: dict[str, Any] = {"model": "tiny", "input": "Hello there", "temperature": 0.9, "max_output_tokens": 24}
SEED: dict[str, Any] = {"extra_body": {"seed": 7}}


def test_a_response_is_the_same_message(client: openai.OpenAI) -> None:
    wanted = chat(client, **SAMPLED)
    answer = client.responses.create(**ASKED, **SEED)
    assert Response.model_validate(answer.model_dump(), strict=True)
    assert answer.output_text == wanted.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason, answer.seed) == ("incomplete", "max_output_tokens", 7)
    used = (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens)
    assert used == (wanted.usage.prompt_tokens, 24, wanted.usage.total_tokens)
    parts = [{"type": "input_text", "text": "Hello "}, {"type": "input_text", "text": "there"}]
    told: Any = [{"role": "user", "content": parts}]
    assert client.responses.create(**{**ASKED, "input": told}, **SEED).output_text == answer.output_text
    again: Any = [*told, *(item.model_dump() for item in answer.output), {"role": "user", "content": "Go on."}]
    longer = client.responses.create(**{**ASKED, "input": again}, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, *HELLO, wanted.choices[0].message.model_dump()]
    messages += [{"role": "user", "content": "Go on."}]
    told = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert longer.usage.input_tokens == told.usage.prompt_tokens


def test_events_of_a_response(client: openai.OpenAI) -> None:
    """In their order, numbered, and put together by the client's helper."""
    whole = client.responses.create(**ASKED, **SEED)
    events = list(client.responses.create(**ASKED, **SEED, stream=True))
    for event in events:
        assert type(event).model_validate(event.model_dump(), strict=True)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == begin + ["output_text.delta"] * len(deltas) + end
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens == 24


def test_a_response_follows_a_schema(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_output_tokens": None}
    found = client.responses.parse(**asked, **SEED, text_format=Pair)
    assert isinstance(found.output_parsed, Pair)
    assert found.status == "completed"
    with client.responses.stream(**asked, **SEED, text_format=Pair) as events:
        for _ in events:
            pass
        assert events.get_final_response().output_parsed == found.output_parsed


def test_responses_that_are_refused(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    """By name; what fails later is the stream's last event."""
    for field, value in (
        ("previous_response_id", "resp_1"),
        ("tools", [{"type": "function", "name": "f", "parameters": {}, "strict": False}]),
        ("max_output_tokens", 10_000),
        ("temperature", -1),
        ("input", [{"type": "function_call_output", "call_id": "x", "output": "y"}]),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(**{**ASKED, field: value}, stream=True)
        assert error.value.param == ("input" if field == "max_output_tokens" else field)

    def failing(*_: Any) -> None:
        raise RuntimeError("a secret")

    hook = decoder.target.model.register_forward_pre_hook(failing)
    try:
        *_, last = client.responses.create(**ASKED, stream=True)
    finally:
        hook.remove()
    assert (last.type, last.code) == ("error", "server_error")


def test_models_are_one(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.max_model_len) == ("tiny", CONTEXT)
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": "other"}, "model", "not served here"),
    ({"temperature": -1}, "temperature", "it must be positive"),
    ({"temperature": 1e-40}, "temperature", "it must be positive"),
    ({"top_p": 3}, "top_p", "at most 1"),
    ({"n": 17}, "n", "<= 16"),
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": [{"role": "user\nsystem", "content": "x"}]}, "messages", "Invalid enum value"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None, "reads text only"),
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"max_tokens": 10_000}, "messages", "new ones exceed it"),
    ({"stop": ["a"] * 5}, "stop", "length <= 4"),
    ({"stop": [""]}, "stop", "length >= 1"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "not in the target's vocabulary"),
    ({"logit_bias": {"5": 1e39}}, "logit_bias", "numbers up to"),
    ({"top_logprobs": 21}, "top_logprobs", "<= 20"),
    ({"seed": 2**70}, "seed", "64 bits"),
    ({"response_format": {"type": "yaml"}}, "response_format", "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "what"}}}}, None, "schema"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "calls"),
    ({"tool_choice": "required"}, "tool_choice", "no tool to be called"),
    ({"extra_body": {"best_of": 3}}, "best_of", "ask for n texts"),
    ({"extra_body": {"guided_json": {}}}, "guided_json", "response_format"),
    ({"extra_body": {"chat_template": "{{ x }}"}}, "chat_template", "the model's template"),
    ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs", "model's template"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "param", "words"), REFUSED, ids=[str(options)[:40] for options, _, _ in REFUSED])
def test_what_is_wrong_is_told_by_name(
    client: openai.OpenAI, options: dict[str, Any], param: str | None, words: str, stream: bool
) -> None:
    """Before a stream begins, too."""
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as error:
        client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "stream": stream, **options})
    assert error.value.param == param
    assert words in error.value.message
    assert error.value.type in ("invalid_request_error", "not_found_error")


def test_a_prompt_beyond_the_context_has_a_code(client: openai.OpenAI) -> None:
    for options in ({"prompt": "x" * CONTEXT}, {"prompt": "x" * 500, "max_tokens": 13}):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="tiny", **options)
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")
        for words in ("this model's maximum context length is", "context_length_exceeded"):  # litellm's, langchain's
            assert words in error.value.message


def test_unknown_fields_are_ignored(client: openai.OpenAI) -> None:
    more = {"metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": False, "reasoning_effort": "low"}
    extra = {"best_of": 1, "suffix": None, "continuous": 3}
    answer = chat(client, user="me", store=False, extra_body=extra, **more, **SAMPLED)
    assert answer.choices[0].message == chat(client, **SAMPLED).choices[0].message
