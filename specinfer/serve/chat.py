"""``/v1/chat/completions``: messages in, a message out, with tool calls where the target's template has them.

Knows: roles, templates, transformers' parser of responses.  Does not know: HTTP, when steps are taken.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any
from uuid import uuid4

from msgspec import to_builtins

from specinfer.common.chat import ChatOptions
from specinfer.common.token_text import plain_text
from specinfer.engine.requests import Request
from specinfer.serve.answer import Answer, Served
from specinfer.serve.choice import Choice, Likely, News, token_bytes
from specinfer.serve.protocol import ApiError, ChatBody, Message

REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field
NAMED = {"content": "content", **dict.fromkeys(REASONING, REASONING[0])}  # parts by the fields of templates


class Deltas:
    """From a text to the parts of a message, by the target's response template; without one it is all content.

    What looks like a call of a tool and is none, or was cut, is content, and so is all that follows.

    Args:
        parser: transformers' ``ResponseParser``, or None.

    Attributes:
        calls: of tools so far.
    """

    def __init__(self, parser: Any = None) -> None:
        self.parser, self.calls = parser, 0
        self._call = ""  # text of one that has not ended

    def of(self, text: str, ended: bool) -> list[dict[str, Any]]:
        """Return the parts that more text brings: "content", "reasoning_content" or one of "tool_calls" each."""
        if self.parser is None:
            return [{"content": text}] if text else []
        parts = self._parsed(lambda parser: parser.feed(text), text)
        return parts + (self._parsed(lambda parser: parser.finalize()[1]) if ended and self.parser else [])

    def _parsed(self, parse: Callable[[Any], list[dict[str, Any]]], text: str = "") -> list[dict[str, Any]]:
        """Return the parts that the parser finds; of what it refuses, the text."""
        content = self._call + text
        try:
            return [delta for event in parse(self.parser) if (delta := self._delta(event))]
        except (AttributeError, LookupError, TypeError, ValueError):
            self.parser = None
            return [{"content": content}] if content else []

    def _delta(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return the part that an event of the parser brings, or nothing."""
        name, kind = event["field"], event["type"]
        if kind == "region_chunk" and name == "tool_calls":
            self._call += event["text"]
        elif kind == "region_chunk" and name in NAMED:
            return {NAMED[name]: event["text"]}
        elif kind == "region_close" and name == "tool_calls":
            function, self._call = event["value"]["function"], ""
            arguments = function.get("arguments", {})
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            called = {"name": function["name"], "arguments": text}
            self.calls += 1
            call = {"index": self.calls - 1, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": called}
            return {"tool_calls": [call]}
        return {}


class Chat(Answer[ChatBody]):
    """The answer to a conversation."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    source = "messages"

    def __init__(self, body: ChatBody, served: Served, client: str = "") -> None:
        super().__init__(body, served, client)
        self.deltas: list[Deltas] = []  # of each choice

    @cached_property
    def template(self) -> dict[str, Any] | None:
        """How the target writes tool calls and reasoning, if that is known."""
        return response_template(self.served.decoder)

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools that the target is told of.

        Raises:
            ApiError: calls that nobody could read, or that would have to be forced.
        """
        choice = self.body.tool_choice
        if choice not in (None, "auto", "none"):
            raise ApiError(400, f"tool_choice={choice!r:.60}: calls are not forced; give auto or none", "tool_choice")
        if not self.body.tools or choice == "none":
            return None
        if self.template is None:
            raise ApiError(400, "tools: nothing says how this model writes calls, so they could not be read", "tools")
        return self.body.tools

    def read(self) -> Iterator[list[int]]:
        """Yield the token ids of the conversation."""
        more = dict(self.body.chat_template_kwargs or {})
        if "chat_template" in more:
            raise ApiError(400, "chat_template_kwargs: the model's template is used", "chat_template_kwargs")
        chat = ChatOptions(
            tools=self.tools,
            add_generation_prompt=self.body.add_generation_prompt,
            continue_final_message=self.body.continue_final_message,
            enable_thinking=more.pop("enable_thinking", None),
            chat_template_kwargs=more or None,
            sanitize_control_tokens=True,
        )
        yield self.served.decoder.read([*map(_as_read, self.body.messages)], chat=chat).only

    def choice(self, request: Request) -> Choice:
        """Return the choice of a request, whose text keeps special tokens if they are parsed."""
        tokenizer, parser = self.served.decoder.tokenizer, None
        if self.template is not None:
            prefix = tokenizer.decode(self.prompts[0])
            parser = tokenizer.get_response_parser(self.template, prefix=prefix, tools=self.body.tools)
        self.deltas.append(Deltas(parser))
        return Choice(request, self.body.stops, special=parser is not None)

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks that say whose message it is."""
        for index in range(len(self.choices)):
            yield self.chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def chunks_of(self, index: int, news: News) -> Iterator[dict[str, Any]]:
        """Yield the chunks of what is new in a choice: a part each, and the end."""
        logprobs = self._logprobs(news.tokens)
        for delta in self.deltas[index].of(news.text, news.reason is not None):
            yield self.chunk(index, {"delta": delta}, logprobs)
            logprobs = None
        if news.reason:
            yield self.chunk(index, {"delta": {}}, logprobs, ended=True)

    def ending(self, index: int) -> dict[str, Any]:
        """Return what is said of a choice that has ended: calls of tools are a reason of their own."""
        return super().ending(index) | ({"finish_reason": "tool_calls"} if self.deltas[index].calls else {})

    def whole_choice(self, index: int, news: News) -> dict[str, Any]:
        """Return a choice in one piece."""
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for delta in self.deltas[index].of(news.text, True):
            for name, part in delta.items():
                message[name] = part if message.get(name) is None else message[name] + part
        if not self.deltas[index].calls:
            message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            del call["index"]
        return {"index": index, "message": message, "logprobs": self._logprobs(news.tokens), **self.ending(index)}

    def _logprobs(self, tokens: Sequence[Likely]) -> dict[str, Any] | None:
        """Return log-probabilities of tokens, in the form of messages."""
        if not tokens:
            return None
        return {"content": [self._token(*each[:2]) | self._top(each) for each in tokens], "refusal": None}

    def _top(self, each: Likely) -> dict[str, Any]:
        return {"top_logprobs": [self._token(*pair) for pair in each.top]}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        tokenizer = self.served.decoder.tokenizer
        return {"token": plain_text(tokenizer, token), "logprob": logprob, "bytes": token_bytes(tokenizer, token)}


def response_template(decoder: Any) -> dict[str, Any] | None:
    """Return how a target writes tool calls and reasoning: its tokenizer says so, or transformers knows the family."""
    if not hasattr(decoder.tokenizer, "get_response_parser"):
        return None
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:
        return getattr(decoder.tokenizer, "response_template", None)
    found: dict[str, Any] | None = get_response_template(decoder.tokenizer, decoder.target.model)
    return found


def _as_read(message: Message) -> dict[str, Any]:
    """Return a message as templates read it: arguments as objects, one name for reasoning and for instructions.

    Raises:
        ApiError: arguments of a call are no JSON.
    """
    found = {name: value for name, value in to_builtins(message).items() if value is not None}
    if found["role"] == "developer":
        found["role"] = "system"
    if reasoning := next((found.pop(name) for name in REASONING if name in found), None):
        found[REASONING[0]] = reasoning
    for call in found.get("tool_calls", ()):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str):
            try:
                call["function"]["arguments"] = json.loads(arguments or "{}")
            except ValueError:
                raise ApiError(400, "messages: the arguments of a tool call are no JSON", "messages") from None
    return found
