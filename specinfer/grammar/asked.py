"""The grammar that a call asks for: a JSON schema, a grammar, a regex or a list of strings, one of them.

Knows: the options, among them OpenAI's ``response_format``, and their shapes.
Does not know: whether a grammar has mistakes, how it is compiled and followed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypedDict

from specinfer.common.values import plain
from specinfer.errors import SamplingError

FORMATS = ("text", "json_object", "json_schema")
NUL = "holds a NUL character, which no text should: leave it out"
SHAPE = '{"type": "json_schema", "json_schema": {"schema": {...}}}'


class GrammarOptions(TypedDict, total=False):
    """What the text may be; one of these.  They need llguidance: ``pip install "specinfer[grammar]"``.

    Attributes:
        response_format: OpenAI's.  ``{"type": "json_schema", "json_schema": {"schema": {...}}}`` is JSON of a schema,
            with 20 spaces and newlines between its tokens at most, and none if the schema holds ``"x-guidance":
            {"whitespace_flexible": False}``.  A keyword that cannot be followed is refused; with ``"strict": False``
            beside the schema it is ignored.  ``{"type": "json_object"}`` is any JSON object, ``{"type": "text"}`` text.
        grammar: in llguidance's form of Lark; it begins with the rule ``start``.
        regex: that the whole text matches, in Rust's syntax.
        choices: strings, of which the text is one.
    """

    response_format: Mapping[str, object] | None
    grammar: str | None
    regex: str | None
    choices: Sequence[str] | None


class Grammar(NamedTuple):
    """The grammar of a text.

    Attributes:
        kind: "json_schema", "grammar" or "regex".
        text: in the kind's language.
        lenient: whether keywords of a schema that cannot be followed are ignored.
    """

    kind: str
    text: str
    lenient: bool = False


def asked(options: GrammarOptions) -> Grammar | None:
    """Return the grammar that a call's options ask for; None if the text is free.

    Raises:
        SamplingError: two of them, or one that has another shape.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) > 1:
        raise SamplingError(f"{' and '.join(given)} both say what the text may be: give one of them")
    return next((READERS[name](plain(value)) for name, value in given.items()), None)


def schema_text(name: str, schema: object) -> str:
    """Return a schema as JSON; raise `SamplingError` if the option of this name holds something else."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingError(f"{name}: the schema is not JSON ({error!s:.100}): give plain values") from error
    if "\\u0000" in text.replace(r"\\", ""):
        raise SamplingError(f"{name} {NUL}")
    return text


def _read_format(value: object) -> Grammar | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in FORMATS:
        raise SamplingError(f"response_format={value!r:.60} is unknown: its type must be one of {', '.join(FORMATS)}")
    if kind == "text" or not isinstance(value, Mapping):
        return None
    if kind == "json_object":
        return Grammar("json_schema", '{"type": "object"}')
    given = value.get("json_schema")
    if not isinstance(given, Mapping) or not isinstance(given.get("schema"), Mapping):
        raise SamplingError(f"response_format={value!r:.60} holds no schema (an object): give {SHAPE}")
    text = schema_text("response_format", given["schema"])
    return Grammar("json_schema", text, lenient=given.get("strict") is False)


def _read_choices(value: object) -> Grammar:
    strings = [] if isinstance(value, str) or not isinstance(value, Sequence) else [*value]
    if not strings or not all(isinstance(each, str) and each for each in strings):
        raise SamplingError(f"choices={value!r:.60} are not strings: give a list of at least one, none of them empty")
    written = [json.dumps(_text("choices", each), ensure_ascii=False) for each in strings]
    return Grammar("grammar", f"start: {' | '.join(written)}")


def _text(name: str, value: object) -> str:
    """Return text; raise `SamplingError` for anything else."""
    if not isinstance(value, str) or re.search("[\ud800-\udfff]", value):
        raise SamplingError(f"{name}={value!r:.60} is not text: give a string")
    if "\0" in value:
        raise SamplingError(f"{name} {NUL}")
    return value


READERS: dict[str, Callable[[object], Grammar | None]] = {
    "response_format": _read_format,
    "grammar": lambda value: Grammar("grammar", _text("grammar", value)),
    "regex": lambda value: Grammar("regex", _text("regex", value)),
    "choices": _read_choices,
}
