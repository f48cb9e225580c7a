"""The requests of clients, and the form of errors: the fields of OpenAI's API, and those that vLLM has beside them.

Knows: names, types and limits of fields, which options of the engine they are.
Does not know: models, prompts, HTTP beyond the number of a status.
"""

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from msgspec import Meta, MsgspecError, Struct, convert
from msgspec.json import decode
from transformers import GenerationConfig

from specinfer.engine.options import Options
from specinfer.engine.penalties import FrequencyPenalty, PresencePenalty
from specinfer.errors import InputError, SamplingError

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Struct)
T = TypeVar("T")
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tops = Annotated[int, Meta(ge=0, le=20)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Ids = list[int]
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    500: "server_error",
    503: "server_error",
}  # by status
SAME = {  # options of the engine that clients know by another name
    "stop_strings": "stop",
    "sequence_bias": "logit_bias",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
# Fields that would change the text if they were ignored: names, values that mean nothing, and what to do.
REFUSED: list[tuple[str, tuple[object, ...], str]] = [
    ("best_of", (1,), "ask for n texts"),
    ("suffix", ("",), "only what stands before a text is read"),
    ("audio", (), "text is all that is written"),
    ("modalities", (["text"],), "text is all that is written"),
    ("functions function_call", (), "give tools and tool_choice"),
    ("web_search_options", (), "nothing is searched"),
    ("chat_template", (), "the model's template is used"),
    ("documents", ([],), "put them into messages"),
    ("use_beam_search", (False,), "it keeps several hypotheses, and verification follows one"),
    ("length_penalty", (1,), "it belongs to beam search"),
    ("guided_json guided_regex guided_choice guided_grammar structured_outputs", (), "give response_format"),
    ("stop_token_ids bad_words allowed_token_ids", ([],), "give logit_bias"),
    ("previous_response_id conversation background", (False,), "nothing is kept: give all messages as input"),
    ("prompt_logprobs", (0,), "give echo and logprobs to /v1/completions"),
    ("truncate_prompt_tokens", (), "shorten the prompt"),
    ("logits_processors", ([],), "the server runs no code of its clients"),
]


class ApiError(Exception):
    """An error that a client is sent instead of an answer.

    Args:
        status: of HTTP.
        message: for people.
        param: the field that is wrong.
        code: for programs.
        headers: in addition.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, object]:
        """The protocol's object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def overloaded(message: str) -> ApiError:
    """Return the error of a server that could answer later."""
    return ApiError(503, message, code="overloaded", headers={"Retry-After": "1"})


def overdue(seconds: float) -> ApiError:
    """Return the error of an answer that takes longer than it may; to ask for it again would take as long."""
    message = f"the answer is not complete after {seconds:g} s, which is the limit: ask for fewer tokens"
    return ApiError(408, message, code="timeout", headers={"x-should-retry": "false"})


def failed() -> ApiError:
    """Return the error of a server that failed: its log says why, clients are not told."""
    return ApiError(500, "the server failed in this request; its log says why", code="server_error")


def refused(error: InputError | SamplingError) -> ApiError:
    """Return the error of a request that the engine refuses; its message begins with the field's name."""
    name = re.split(r"\W", str(error), maxsplit=1)[0]
    name = SAME.get(name, name)
    return ApiError(400, str(error), name if name in KNOWN else None)


class StreamOptions(Struct):
    """How an answer is streamed."""

    include_usage: bool | None = None


class Shared(Struct, kw_only=True):
    """The fields that requests of all kinds have; None is the usual."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    seed: int | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None


class Body(Shared, kw_only=True):
    """The fields that chats and completions have; None is the usual."""

    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, object] | None = None

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def kept_logprobs(self) -> bool | int:
        """The engine's option `logprobs`."""
        raise NotImplementedError

    def options(self, config: GenerationConfig) -> Options:
        """Return the engine's options, those that depend on the prompt apart.

        Args:
            config: the checkpoint's ``GenerationConfig``, whose values are the usual ones.

        Raises:
            ApiError: `logit_bias` has a key that is no token id.
        """
        asked = Options(
            temperature=_first(self.temperature, config.temperature, 1.0),
            repetition_penalty=self.repetition_penalty,
            sequence_bias=self._bias() or None,
            stop_strings=self.stops or None,
            min_new_tokens=self.min_tokens,
            eos_token_id=-1 if self.ignore_eos else None,
            response_format=self.response_format,
            logprobs=self.kept_logprobs,
        )
        if asked["temperature"]:
            top_p, top_k = _first(self.top_p, config.top_p, 1.0), _first(self.top_k, config.top_k, 0)
            asked |= {"top_p": top_p, "top_k": max(top_k, 0), "min_p": self.min_p}  # -1 is vLLM's for all tokens
        return asked

    def penalties(self, start: int) -> list[PresencePenalty]:
        """Return the processors of the penalties on the tokens of a text that begins at an index."""
        named = ((PresencePenalty, self.presence_penalty), (FrequencyPenalty, self.frequency_penalty))
        return [kind(value, start) for kind, value in named if value]

    def _bias(self) -> dict[tuple[int, ...], float]:
        """Return the biases by token."""
        try:
            return {(int(token),): bias for token, bias in (self.logit_bias or {}).items()}
        except ValueError:
            raise ApiError(400, "logit_bias: a key is not a token id", "logit_bias") from None


class Function(Struct, omit_defaults=True):
    """The function that a tool call names, and its arguments."""

    name: str
    arguments: str | dict[str, object] = ""


class ToolCall(Struct):
    """A call in an earlier message."""

    function: Function
    id: str | None = None
    type: str = "function"


class Declared(Struct):
    """A function that may be called.

    Attributes:
        parameters: the schema of its arguments; None if it takes none.
        strict: whether a keyword of the schema that cannot be followed is refused, and not ignored.
    """

    name: str
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool as grammars read it; as a choice, the one that is to be called."""

    type: Literal["function"]
    function: Declared


class TextPart(Struct):
    """A part of a content."""

    type: Literal["text"]
    text: str


class Message(Struct, omit_defaults=True):
    """A message of a conversation.  Roles are these only, because templates write roles as they come."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, object]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None


class Prediction(Struct):
    """A text that the message may repeat, from which look-up drafts also propose."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The text, put together."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body, kw_only=True):
    """A request for the next message of a conversation."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=2048)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Tops | None = None
    tools: Annotated[list[dict[str, object]], Meta(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None

    def __post_init__(self) -> None:
        if self.max_completion_tokens is not None:  # the newer name of the same
            self.max_tokens = self.max_completion_tokens

    @property
    def kept_logprobs(self) -> bool | int:
        """The engine's option `logprobs`."""
        return bool(self.logprobs) and (self.top_logprobs or True)

    @property
    def forced(self) -> list[Tool]:
        """The tools of which one is to be called; none if the target chooses.

        Raises:
            ApiError: no tool has the name that is asked for, or one has another shape.
        """
        if self.tool_choice in (None, "auto", "none"):
            return []
        try:
            tools = convert(self.tools or [], list[Tool])
        except MsgspecError as error:
            raise ApiError(400, f"tools: {error}", "tools") from None
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        found = [tool for tool in tools if wanted in (None, tool.function.name)]
        if not found:
            raise ApiError(400, "tool_choice: there is no tool to be called: give its schema in tools", "tool_choice")
        return found

    def options(self, config: GenerationConfig) -> Options:
        """Return the engine's options, the text that may be repeated among them."""
        return super().options(config) | Options(prediction=self.prediction.text if self.prediction else None)


class CompletionBody(Body, kw_only=True):
    """A request for the continuation of texts."""

    prompt: str | Annotated[list[int | str | Ids], Meta(min_length=1, max_length=2048 * 64)]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Tops | None = None

    @property
    def prompts(self) -> list[str | Ids]:
        """One or several, each as text or token ids.

        Raises:
            ApiError: they are a mixture.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        if ids and len(ids) < len(self.prompt):
            raise ApiError(400, "prompt: give a text, token ids, or a list of those", "prompt")
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]

    @property
    def kept_logprobs(self) -> bool | int:
        """The engine's option `logprobs`."""
        return self.logprobs is not None and (self.logprobs or True)


class InputMessage(Struct):
    """A message in the newer form."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[dict[str, object]]
    type: Literal["message"] = "message"


class TextOptions(Struct):
    """The format of a message, in the newer form."""

    format: dict[str, object] | None = None


class ResponseBody(Shared, kw_only=True):
    """A request for a response, as the newer form calls the next message of a conversation."""

    input: str | Annotated[list[InputMessage], Meta(min_length=1, max_length=2048)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    tools: Annotated[list[object], Meta(max_length=0)] | None = None  # in chats they are

    @property
    def form(self) -> dict[str, object] | None:
        """The format of the message."""
        return self.text.format if self.text else None

    @property
    def chat(self) -> ChatBody:
        """The same as a chat."""
        told = [InputMessage("user", self.input)] if isinstance(self.input, str) else self.input
        begun = [Message("system", self.instructions)] if self.instructions else []
        form = self.form
        if form and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        return ChatBody(
            messages=[*begun, *(Message(each.role, each.content) for each in told)],
            max_tokens=self.max_output_tokens,
            response_format=form,
            **{name: getattr(self, name) for name in Shared.__struct_fields__},
        )


KNOWN = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}


def parsed(data: bytes, kind: type[B]) -> B:
    """Return the request that a body holds.

    Fields that are not known are ignored, unless the text would be another one without them.

    Raises:
        ApiError: it is not JSON, or a field is wrong, by name.
    """
    try:
        fields = decode(data, type=dict[str, object])
        body = convert(fields, kind)
    except (MsgspecError, RecursionError, UnicodeDecodeError) as error:
        where = re.search(r"\$\.(\w+)", str(error))
        what = str(error) or "it is nested too deeply"
        raise ApiError(400, f"the body of the request cannot be read: {what}", where and where[1]) from None
    for names, neutral, advice in REFUSED:
        for name in names.split():
            if fields.get(name) is not None and fields[name] not in neutral:
                raise ApiError(400, f"{name} is not supported, and would change the text: {advice}", name)
    if unknown := sorted(fields.keys() - set(kind.__struct_fields__)):
        log.info("fields that are ignored: %.200r", unknown)
    return body


def _first(asked: T | None, usual: T | None, otherwise: T) -> T:
    """Return the first value that is not None."""
    return next((value for value in (asked, usual) if value is not None), otherwise)
