"""Fifty JSON schemas, each for a keyword or a combination of some; texts that follow them are short."""

from typing import Any

STRING, DIGITS = {"type": "string", "maxLength": 5}, {"type": "string", "pattern": "^[0-9]{1,3}$"}
INTEGER, BOOLEAN = {"type": "integer", "minimum": 0, "maximum": 99}, {"type": "boolean"}


def object_of(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object without other properties; all are required unless some are named."""
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**closed, "required": [*(required or properties)]}


def array_of(item: Any, least: int = 0, most: int = 3) -> dict[str, Any]:
    """Return the schema of an array."""
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


TREE = {"$defs": {"node": object_of("value", value=BOOLEAN, below=array_of({"$ref": "#/$defs/node"}, 0, 1))}}

SCHEMAS: dict[str, dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": BOOLEAN,
    "integer": {"type": "integer", "minimum": -20, "maximum": 20},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    "multiple of": {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 25},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "negative number": {"type": "number", "maximum": -1, "minimum": -3},
    "string": STRING,
    "string lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "no characters": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}@[a-z]{2,3}\\.com$"},
    "pattern of alternatives": {"type": "string", "pattern": "^(up|down|left)$"},
    "pattern without anchors": {"type": "string", "pattern": "xyz", "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "enum of strings": {"enum": ["red", "green", "reddish"]},
    "enum of kinds": {"enum": [1, None, True, "one", [1]]},
    "const string": {"const": "the only one"},
    "const object": {"const": {"a": [1, 2], "b": None}},
    "const number": {"const": 12.5},
    "several types": {"type": ["boolean", "null"]},
    "object": object_of(a=BOOLEAN),
    "two keys": object_of(first=BOOLEAN, second=INTEGER),
    "optional key": object_of("a", a=BOOLEAN, b=BOOLEAN),
    "optional keys alone": {**object_of(a=BOOLEAN, b=BOOLEAN), "required": []},
    "optional key first": object_of("b", a=BOOLEAN, b=BOOLEAN),
    "no keys": object_of(),
    "keys with a beginning in common": object_of(name=BOOLEAN, name_of_it=BOOLEAN, names=BOOLEAN),
    "key of signs": object_of(**{'a "b"': BOOLEAN, "c\\d": BOOLEAN, "é": BOOLEAN}),
    "more properties": {"type": "object", "additionalProperties": BOOLEAN, "maxProperties": 1},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": BOOLEAN},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "nested": object_of(a=object_of(b=object_of(c=BOOLEAN))),
    "array": array_of(BOOLEAN),
    "array of a size": array_of(INTEGER, 2, 2),
    "empty array": array_of(BOOLEAN, 0, 0),
    "array of objects": array_of(object_of(a=BOOLEAN), 1, 2),
    "array of arrays": array_of(array_of(BOOLEAN, 1, 2), 1, 2),
    "tuple": {"type": "array", "prefixItems": [BOOLEAN, INTEGER], "items": False, "minItems": 2},
    "any of": {"anyOf": [BOOLEAN, DIGITS, {"type": "null"}]},
    "any of objects": {"anyOf": [object_of(cat=BOOLEAN), object_of(dog=BOOLEAN, age=INTEGER)]},
    "one of": {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "reference": {"$defs": {"flag": BOOLEAN}, **object_of(a={"$ref": "#/$defs/flag"}, b={"$ref": "#/$defs/flag"})},
    "definitions": {"definitions": {"n": INTEGER}, **object_of(a={"$ref": "#/definitions/n"})},
    "recursion": {**TREE, "$ref": "#/$defs/node"},
    "annotations": {"title": "A", "description": "b", "default": True, "examples": [True], **BOOLEAN},
    "dialect": {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/a", **BOOLEAN},
    "a record": object_of(
        name=STRING,
        age=INTEGER,
        status={"enum": ["active", "inactive"]},
        tags=array_of(STRING, 1, 2),
        address=object_of(street=STRING, code=DIGITS),
    ),
    "any object": {"type": "object"},
}
