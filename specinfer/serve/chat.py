"""``/v1/chat/completions``: messages in, a message out, with tool calls where the target's template has them.

Knows: roles, templates, log-probabilities of tokens.  Does not know: HTTP, when steps are taken.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from msgspec import to_builtins

from specinfer.common.chat import ChatOptions
from specinfer.common.token_text import plain_text, split_bytes
from specinfer.engine.options import Options
from specinfer.engine.requests import Request
from specinfer.serve.answer import Answer, Served
from specinfer.serve.choice import Choice, Likely, News
from specinfer.serve.protocol import ApiError, ChatBody, Message, Tool
from specinfer.serve.tools import REASONING, Delta, Deltas, Forced, response_template


class Chat(Answer[ChatBody]):
    """The answer to a conversation."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    source = "messages"

    def __init__(self, body: ChatBody, served: Served, client: str = "") -> None:
        super().__init__(body, served, client)
        self.deltas: list[Deltas] = []  # of each choice
        self.untold: dict[int, list[Likely]] = {}  # tokens of a choice that no chunk has told of yet

    @cached_property
    def template(self) -> dict[str, object] | None:
        """How the target writes tool calls and reasoning, if that is known."""
        return response_template(self.served.decoder)

    @property
    def tools(self) -> list[dict[str, object]] | None:
        """The tools that the target is told of.

        Raises:
            ApiError: calls that nobody could read.
        """
        if not self.body.tools or self.body.tool_choice == "none":
            return None
        if self.template is None:
            raise ApiError(400, "tools: nothing says how this model writes calls, so they could not be read", "tools")
        return self.body.tools

    @property
    def several(self) -> bool:
        """Whether an answer may hold more calls of tools than one."""
        return self.body.parallel_tool_calls is not False and not isinstance(self.body.tool_choice, Tool)

    @cached_property
    def chat(self) -> ChatOptions:
        """How the conversation becomes a prompt."""
        more: dict[str, Any] = {**(self.body.chat_template_kwargs or {})}
        if "chat_template" in more:
            raise ApiError(400, "chat_template_kwargs: the model's template is used", "chat_template_kwargs")
        return ChatOptions(
            tools=self.tools,
            add_generation_prompt=self.body.add_generation_prompt,
            continue_final_message=self.body.continue_final_message,
            enable_thinking=more.pop("enable_thinking", None),
            chat_template_kwargs=more or None,
            sanitize_control_tokens=True,
        )

    def read(self) -> Iterator[list[int]]:
        """Yield the token ids of the conversation."""
        yield self.served.decoder.read([*map(_as_read, self.body.messages)], chat=self.chat).only

    def options(self) -> Options:
        """Return the engine's options; forced calls take the place of any other grammar of the text."""
        forced = self.body.forced
        if not forced:
            return super().options()
        grammar = Forced(self.served.decoder, self.template, self.chat).grammar(forced, self.several)
        return super().options() | {"response_format": None, "grammar": grammar}

    def choice(self, request: Request) -> Choice:
        """Return the choice of a request, whose text keeps special tokens if they are parsed."""
        tokenizer, parser = self.served.decoder.tokenizer, None
        if self.template is not None:
            prefix = tokenizer.decode(self.prompts[0])
            parser = tokenizer.get_response_parser(self.template, prefix=prefix, tools=self.body.tools)
        self.deltas.append(Deltas(parser, self.several))
        return Choice(request, self.body.stops, special=parser is not None)

    def first_chunks(self) -> Iterator[dict[str, object]]:
        """Yield the chunks that say whose message it is."""
        for index in range(len(self.choices)):
            yield self.chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def chunks_of(self, index: int, news: News) -> Iterator[dict[str, object]]:
        """Yield the chunks of a choice's news: a part each, and the end."""
        tokens = [*self.untold.pop(index, ()), *news.tokens]
        for delta in self.deltas[index].of(news.text, news.reason is not None):
            yield self.chunk(index, {"delta": delta}, self._logprobs(tokens))
            tokens = []
        if news.reason:
            yield self.chunk(index, {"delta": {}}, self._logprobs(tokens), ended=True)
        self.untold[index] = tokens  # text that is no part of the message, or not yet

    def ending(self, index: int) -> dict[str, object]:
        """Return the fields of a choice that has ended: calls that the target chose are a reason of their own."""
        found = super().ending(index)
        chose = self.deltas[index].calls and not isinstance(self.body.tool_choice, Tool)
        return found | {"finish_reason": "tool_calls"} if chose and found["finish_reason"] == "stop" else found

    def whole_choice(self, index: int, news: News) -> dict[str, object]:
        """Return a choice in one piece."""
        message: Delta = {"role": "assistant", "content": None, "refusal": None}
        for delta in self.deltas[index].of(news.text, True):
            for name, part in delta.items():
                message[name] = part if message.get(name) is None else message[name] + part
        if not self.deltas[index].calls:
            message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            del call["index"]
        return {"index": index, "message": message, "logprobs": self._logprobs(news.tokens), **self.ending(index)}

    def _logprobs(self, tokens: Sequence[Likely]) -> dict[str, object] | None:
        """Return log-probabilities of tokens, in the form of messages."""
        if not tokens:
            return None
        tops = [[self._token(*pair) for pair in each.top] for each in tokens]
        told = [self._token(*each[:2]) | {"top_logprobs": top} for each, top in zip(tokens, tops, strict=True)]
        return {"content": told, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, object]:
        tokenizer = self.served.decoder.tokenizer
        text, found = plain_text(tokenizer, token), split_bytes(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode() if found is None else found)}


def _as_read(message: Message) -> dict[str, object]:
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
                raise ApiError(400, "messages: the arguments of a tool call are not JSON", "messages") from None
    return found
