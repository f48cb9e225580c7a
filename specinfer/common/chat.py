"""Chat messages through a tokenizer's template, with the options that transformers' `apply_chat_template` takes.

Knows: roles, parts of contents, names in templates.  Does not know: batches, padding, decoding.

Messages that end with the assistant's are a begun answer, which is continued, as in transformers' pipelines.  What a
template does not read would be dropped without a word, so it is refused by name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from specinfer.common.values import plain
from specinfer.errors import InputError

Message: TypeAlias = Mapping[str, object]

TEXTS = ("text", "input_text", "output_text")  # types of parts that are text, by OpenAI's names
REPR = 16  # characters that show how parts look in Python; the end is cut where an answer is continued
BEGINNING = [{"role": "user", "content": "x"}]  # messages that show the beginning of a template's texts


class ChatOptions(TypedDict, total=False):
    """How messages become a prompt; None is the usual.

    Attributes:
        tools: JSON schemas, or functions with type hints and a docstring; the template must read them.
        add_generation_prompt: whether a new turn of the assistant is begun; usually, unless the last one is continued.
        continue_final_message: whether the last message is continued; usually if it is the assistant's.
        enable_thinking: whether a model that thinks aloud does; the template must read it.
        chat_template_kwargs: other variables of the template, by name.
        sanitize_control_tokens: whether control tokens that messages spell out stay text.  Transformers before 5.23
            does not know the option.
    """

    tools: Sequence[object] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | str | None
    enable_thinking: bool | None
    chat_template_kwargs: Mapping[str, object] | None
    sanitize_control_tokens: bool | None


def _variables(options: ChatOptions) -> dict[str, object]:
    """Return the variables of the template that options set.

    Raises:
        InputError: a variable is given twice, or something is no option.
    """
    more, tools = options.get("chat_template_kwargs") or {}, options.get("tools")
    if not isinstance(more, Mapping) or not all(isinstance(name, str) for name in more):
        raise InputError(f"chat_template_kwargs={more!r:.60} is not a dict: give variables of the template by name")
    if twice := sorted(more.keys() & {*ChatOptions.__annotations__, "messages", "tokenize", "return_dict"}):
        raise InputError(f"chat_template_kwargs holds {twice[0]}, which is a separate option: give it by itself")
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
        raise InputError(f"tools={tools!r:.60} is not a list: give JSON schemas, or functions with type hints")
    given = {"tools": tools or None, "enable_thinking": plain(options.get("enable_thinking"))}
    return {**more, **{name: value for name, value in given.items() if value is not None}}


def rendered(messages: Sequence[Message], tokenizer: Any, options: ChatOptions, tokenize: bool = True) -> object:
    """Return a tokenizer's encoding of messages, or the text that its template writes.

    Raises:
        InputError: a content that is no text, or an option that the template does not read.
        Exception: of any kind, as tokenizers and templates raise them.
    """
    if not all(isinstance(message, Mapping) for message in messages):
        raise InputError("a message is not a dict: give each a role and a content")
    variables = _variables(options)
    for name in variables:
        _check_read(name, tokenizer, variables.get("tools"))
    ending = _ending(messages, options)
    safe = {"sanitize_control_tokens": True} if options.get("sanitize_control_tokens") else {}

    def write(given: Sequence[Message], tokenize: bool) -> object:
        more = {**ending, **variables, **(safe if tokenize else {})}
        return tokenizer.apply_chat_template([*given], tokenize=tokenize, return_dict=True, **more)

    return write(_as_read(messages, lambda given: str(write(given, False))), tokenize)


def begins_as_rendered(text: str, tokenizer: object) -> str:
    """Return the special token that a text and all texts of a tokenizer's template begin with; "" if there is none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = [token.content for token in added if token.special and text.startswith(token.content)]
    if not found or not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        written = str(rendered(BEGINNING, tokenizer, ChatOptions(), tokenize=False))
    except Exception:  # templates may raise anything
        return ""
    token = max(found, key=len)
    return token if written.startswith(token) else ""


def _ending(messages: Sequence[Message], options: ChatOptions) -> dict[str, object]:
    """Return how the prompt ends: with a turn that is begun, or in the last message.

    Raises:
        InputError: both are asked for, or neither an option's value is.
    """
    begin, continued = options.get("add_generation_prompt"), options.get("continue_final_message")
    for name, value in (("add_generation_prompt", begin), ("continue_final_message", continued)):
        if value is not None and not isinstance(value, bool if name.startswith("add") else bool | str):
            raise InputError(f"{name}={value!r:.60} is neither True nor False: give one of them")
    last = messages[-1]
    is_begun = last.get("role") == "assistant" and last.get("content") is not None
    if continued is None:
        continued = is_begun and not begin
    if begin and continued:
        raise InputError("add_generation_prompt begins a message, continue_final_message continues the last: give one")
    return {"add_generation_prompt": not continued if begin is None else begin, "continue_final_message": continued}


def _check_read(name: str, tokenizer: object, tools: object) -> None:
    """Raise `InputError` unless the tokenizer's template has a variable of this name."""
    choose = getattr(tokenizer, "get_chat_template", None)
    template = choose(tools=tools) if choose else getattr(tokenizer, "chat_template", None)
    if not re.search(rf"\b{re.escape(name)}\b", str(template)):
        raise InputError(f"this tokenizer's chat template does not read {name}, so nothing would change: leave it out")


def _as_read(messages: Sequence[Message], write: Callable[[Sequence[Message]], str]) -> Sequence[Message]:
    """Return messages with contents in the form that a template writes out: as given, as strings, or as parts.

    Raises:
        InputError: a part is no text.
    """
    texts = [_text(message) for message in messages]
    strings = [_with(message, text) for message, text in zip(messages, texts, strict=True)]
    parts = [_with(message, [{"type": "text", "text": text}]) for message, text in zip(messages, texts, strict=True)]
    for form in (messages, strings, parts):
        if _is_written(form, texts, write):
            return form
    return messages if all(isinstance(message.get("content"), str | None) for message in messages) else strings


def _is_written(messages: Sequence[Message], texts: Sequence[str], write: Callable[[Sequence[Message]], str]) -> bool:
    """Return whether a template writes out the users' texts, and not how parts look in Python."""
    try:
        written = write(messages)
    except Exception:  # templates may raise anything
        return False
    said = [text for message, text in zip(messages, texts, strict=True) if message.get("role") == "user"]
    contents = [message.get("content") for message in messages]
    looks = [str(content)[:REPR] for content in contents if isinstance(content, list | tuple)]
    return all(text.strip() in written for text in said) and not any(each in written for each in looks)


def _with(message: Message, content: object) -> Message:
    """Return a message with its content in another form; one without a content stays so."""
    return message if message.get("content") is None else {**message, "content": content}


def _text(message: Message) -> str:
    """Return the text of a message, whose content may be given as parts.

    Raises:
        InputError: a part is no text.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return content if isinstance(content, str) else ""
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXTS or not isinstance(part.get("text"), str):
            role = message.get("role")
            raise InputError(f"a part of the {role}'s message is {kind!r:.40}, and the target reads text only")
    return "".join(part["text"] for part in content)
