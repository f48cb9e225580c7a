"""The interactive page: templates with a description inside, and nothing fetched from anywhere.

Knows: page.html, page.css and page.js beside this file, how text is kept from becoming markup.
Does not know: trees.

Text from models reaches the page as JSON inside a script.  Every character that could end the script is written as an
escape.  From the script the text reaches the document as text nodes only.  A fragment draws into a shadow root of its
own: any number of them stand on one notebook page, apart from each other and from the notebook's style.
"""

import hashlib
import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from specinfer.viz.description import Description
from specinfer.viz.style import DARK, LIGHT

_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def fragment_of(description: Description) -> str:
    """Return an element and a script that fills it, for a notebook or a page of one's own.

    Where scripts do not run, the plain text stays.
    """
    data = in_script(description.to_dict())
    name = f"specinfer-{hashlib.sha256(data.encode()).hexdigest()[:16]}"
    call = f'fillAll("{name}", {in_script(_palette() + _template("page.css"))}, {data});'
    script = f'(() => {{\n"use strict";\n{_template("page.js")}\n{call}\n}})();'
    element = f'<div id="{name}" class="specinfer"><pre>{escape(description.plain)}</pre></div>'
    return f"{element}\n<script>\n{script}\n</script>"


def page_of(description: Description) -> str:
    """Return a complete HTML document."""
    template = Template(_template("page.html"))
    return template.substitute(title=escape(description.title), fragment=fragment_of(description))


def to_json(data: Any) -> str:
    """Return data as JSON on one line; NaN and infinities are errors."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def in_script(data: Any) -> str:
    """Return data as JSON that may stand inside a script element: it is free of markup."""
    return to_json(data).translate(_ESCAPES)


def _palette() -> str:
    """Return the colours as variables of the style."""
    light, dark = ("".join(f"--{name}:{c};" for name, c in palette.items()) for palette in (LIGHT, DARK))
    return f'.root{{{light}}}\n:host([data-theme="dark"]) .root{{{dark}}}\n'


@cache
def _template(name: str) -> str:
    """Return a template without indentation and comment lines, which would make each page larger."""
    return re.sub(r"(?m)^ *(//.*\n)?", "", files(__package__).joinpath(name).read_text(encoding="utf-8"))
