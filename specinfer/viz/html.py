"""The interactive page: templates with a model inside, and nothing fetched from anywhere.

Knows: page.html, page.css and page.js beside this file, how text is kept from becoming markup.
Does not know: trees.

Text from models reaches the page as JSON inside a script, with every character that could end the script written as an
escape, and from there the document as text nodes only.  A fragment draws into a shadow root of its own, so that any
number of them stand on one notebook page without meeting, or the notebook's style.
"""

import hashlib
import json
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from specinfer.viz.model import json_of, plain

_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def fragment_of(model: dict[str, Any]) -> str:
    """Return an element and a script that fills it, for a notebook or a page of one's own.

    Where scripts do not run, the plain text stays.
    """
    data = in_script(json_of(model))
    name = f"specinfer-{hashlib.sha256(data.encode()).hexdigest()[:16]}"
    style = in_script(json.dumps(_template("page.css")))
    script = f'(() => {{\n"use strict";\n{_template("page.js")}\nfillAll("{name}", {style}, {data});\n}})();'
    return f'<div id="{name}" class="specinfer"><pre>{escape(plain(model))}</pre></div>\n<script>\n{script}\n</script>'


def page_of(model: dict[str, Any]) -> str:
    """Return a whole HTML document."""
    return Template(_template("page.html")).substitute(title=escape(_title(model)), fragment=fragment_of(model))


def in_script(source: str) -> str:
    """Return JSON that may stand inside a script element: equal to it, and free of markup."""
    return source.translate(_ESCAPES)


@cache
def _template(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _title(model: dict[str, Any]) -> str:
    if "stats" not in model:
        return "A token tree"
    return f"{model['stats']['new_tokens']} tokens in {model['stats']['target_passes']} target passes"
