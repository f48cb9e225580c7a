"""Calls of tools, and reasoning, in texts of a target: transformers' parser reads them, and a grammar forces calls.

How the target writes calls, its chat template shows: it renders a message with sample calls.  If the parser reads just
these out of it, a grammar can put names and arguments of a request's functions into their places.

Knows: templates, transformers' parser of responses, llguidance's form of Lark.  Does not know: requests, choices.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from uuid import uuid4

from specinfer.common.chat import BEGINNING, ChatOptions, Message, rendered
from specinfer.decoder import SpeculativeDecoder
from specinfer.errors import SamplingError
from specinfer.grammar.asked import Grammar, schema_text
from specinfer.serve.protocol import ApiError, Tool

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_parser import ResponseParser

Delta: TypeAlias = dict[str, Any]  # a part of a message: "content", "reasoning_content" or one of "tool_calls"
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of one field
NAMED = {"content": "content", **dict.fromkeys(REASONING, REASONING[0])}  # parts by the fields of templates
NAME, ARGUMENTS = "sample_function", {"sample_argument": "sample value"}  # of calls that templates write
SAMPLE = {"id": "sample001", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
CALLED = {"name": NAME, "arguments": json.dumps(ARGUMENTS)}  # as the parser reads it
CALL = re.compile(f"{NAME}(.*?){re.escape(CALLED['arguments'])}", re.DOTALL)  # as templates write it
NAMES = "[A-Za-z0-9_.:/-]+"  # of functions: every template writes them as they are
AS_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as `json.dumps` does
MOST = 16  # calls in one text: without an end, small models repeat them to the context's
NO_ARGUMENTS: dict[str, object] = {"properties": {}, "additionalProperties": False}


class Deltas:
    """From a text to the parts of a message, by the target's response template; without one it is all content.

    What looks like a call of a tool and is none, or was cut, is content, and so is all that follows.

    Args:
        parser: transformers' ``ResponseParser``, or None.
        several: whether calls after the first one are told.

    Attributes:
        calls: of tools so far.
    """

    def __init__(self, parser: "ResponseParser | None" = None, several: bool = True) -> None:
        self.parser, self.several, self.calls = parser, several, 0
        self._untold = ""  # text of marks and of a call under way

    def of(self, text: str, ended: bool) -> list[Delta]:
        """Return the parts that more text brings, which do not depend on how the text is cut."""
        if self.parser is None:
            return [{"content": text}] if text else []
        found = (part for more in [*text, *[None][:ended]] for part in self._parsed(more))
        parts: list[Delta] = []
        for name, group in groupby(found, lambda part: next(iter(part))):
            same = [*group]
            parts += same if name == "tool_calls" else [{name: "".join(part[name] for part in same)}]
        return parts

    def _parsed(self, more: str | None) -> list[Delta]:
        """Return the parts that the parser finds with one more character, or at the end; if it refuses it, the text."""
        if self.parser is None:
            return [{"content": more}] if more else []
        self._untold += more or ""
        try:
            events = self.parser.feed(more) if more else self.parser.finalize()[1]
            parts = [delta for event in events if (delta := self._delta(event))]
        except (AttributeError, LookupError, TypeError, ValueError):
            self.parser = None
            return [{"content": self._untold}] if self._untold else []
        marks = [(event["type"], event["field"]) for event in events if event["type"] != "region_chunk"]
        if marks and marks[-1] != ("region_open", "tool_calls"):
            self._untold = ""
        return parts

    def _delta(self, event: Mapping[str, Any]) -> Delta:
        """Return the part that an event of the parser brings, or nothing."""
        name, kind = event["field"], event["type"]
        if kind == "region_chunk" and name in NAMED:
            self._untold = self._untold[len(event["text"]) :]
            return {NAMED[name]: event["text"]}
        if kind == "region_close" and name == "tool_calls":
            function = event["value"]["function"]
            arguments = function.get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            called = {"name": function["name"], "arguments": text}
            if not isinstance(called["name"], str):
                raise TypeError("no function is called so")
            if self.calls and not self.several:
                return {}
            self.calls += 1
            call = {"index": self.calls - 1, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": called}
            return {"tool_calls": [call]}
        return {}


def response_template(decoder: SpeculativeDecoder) -> dict[str, object] | None:
    """Return how a target writes tool calls and reasoning: its tokenizer says so, or transformers knows the family."""
    if not hasattr(decoder.tokenizer, "get_response_parser"):
        return None
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:
        return getattr(decoder.tokenizer, "response_template", None)
    return get_response_template(decoder.tokenizer, decoder.target.model)


class Form(NamedTuple):
    """The texts around the names and arguments of calls.

    Attributes:
        before: the name of the first call.
        within: a call, between its name and its arguments.
        after: the arguments of the last call.
        between: the arguments of a call and the name of the next one; None if the target writes one call alone.
    """

    before: str
    within: str
    after: str
    between: str | None = None


@dataclass(frozen=True)
class Forced:
    """Calls that a target is to write after a prompt.

    Attributes:
        decoder: with a tokenizer.
        template: of the target's responses.
        chat: how messages become the prompt.
    """

    decoder: SpeculativeDecoder
    template: dict[str, object] | None
    chat: ChatOptions

    def grammar(self, tools: Sequence[Tool], several: bool) -> str:
        """Return the grammar of a text that calls one of some functions, with arguments of its schema, or several.

        Raises:
            ApiError: a name or a schema cannot be written, or the chat template does not show the form.
        """
        form = self.form
        if form is None:
            message = "tool_choice: the model's chat template does not show how it writes calls: give auto or none"
            raise ApiError(400, message, "tool_choice")
        literal = self.decoder.guidance.literal
        more = f"({literal(form.between)} call){{0,{MOST - 1}}}" if several and form.between is not None else ""
        calls = [self._call(tool, form) for tool in tools]
        return f"start: {literal(form.before)} call {more} {literal(form.after)}\ncall: {' | '.join(calls)}"

    @property
    def form(self) -> Form | None:
        """How the target writes calls; None if its chat template does not tell."""
        pieces: list[list[str]] = []
        with suppress(Exception):  # templates may raise anything
            prompt = self._written(BEGINNING, True)
            pieces = [self._pieces(prompt, 1)]
            pieces.append(self._pieces(prompt, 2))
        if not (pieces and pieces[0]):
            return None
        return Form(*pieces[0], *(piece[2] for piece in pieces[1:] if piece))

    def _pieces(self, prompt: str, calls: int) -> list[str]:
        """Return the texts around names and arguments of sample calls after a prompt; none if others are read."""
        message = {"role": "assistant", "content": "", "tool_calls": [SAMPLE] * calls}
        whole = self._written([*BEGINNING, message], False)
        text = re.split(self._ends, whole.removeprefix(prompt))[0]
        deltas = Deltas(self.decoder.tokenizer.get_response_parser(self.template, prefix=prompt)).of(text, True)
        told = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
        beside = "".join(delta.get("content", "") for delta in deltas).strip()
        is_read = whole.startswith(prompt) and told == [CALLED] * calls and not beside
        pieces = re.split(CALL, text)
        return pieces if is_read and len(pieces) == 2 * calls + 1 else []

    def _written(self, messages: Sequence[Message], begin: bool) -> str:
        """Return messages as the chat template writes them."""
        more = ChatOptions(add_generation_prompt=begin, continue_final_message=False)
        return str(rendered(messages, self.decoder.tokenizer, {**self.chat, **more}, tokenize=False))

    @property
    def _ends(self) -> str:
        """A pattern of the tokens that end a text."""
        given = self.decoder.target.model.generation_config.eos_token_id
        ids = given if isinstance(given, list) else [given]
        texts = [self.decoder.tokenizer.decode([token]) for token in ids if token is not None]
        return "|".join(re.escape(text) for text in texts if text) or "(?!)"

    def _call(self, tool: Tool, form: Form) -> str:
        """Return the grammar of a call, from the function's name to its arguments.

        Raises:
            ApiError: the name or the schema cannot be written.
        """
        function, guidance = tool.function, self.decoder.guidance
        if not re.fullmatch(NAMES, function.name):
            raise ApiError(400, f"tools: {function.name!r:.60} is not a function's name, {NAMES}", "tools")
        given = NO_ARGUMENTS if function.parameters is None else function.parameters
        style = {**AS_WRITTEN, "lenient": not function.strict}
        try:
            schema = schema_text("parameters", {"type": "object", **given, "x-guidance": style})
            guidance.compiled(Grammar("json_schema", schema, lenient=not function.strict))
        except SamplingError as error:
            raise ApiError(400, f"tools: {function.name}: {error}", "tools") from error
        return f"{guidance.literal(function.name + form.within)} %json {schema}"
