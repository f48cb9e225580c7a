"""The interactive page: templates with a description inside, and nothing fetched from anywhere.

Knows: the folder page beside this file, how text is kept from becoming markup.
Does not know: trees.

Text from models reaches the page as JSON inside a script.  Every character that could end the script is written as an
escape.  From the script the text reaches the document as text nodes only.  A fragment draws into a shadow root of its
own: any number of them stand on one notebook page, apart from each other and from the notebook's style.
"""

import hashlib
import json
import re
from base64 import b64encode
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from specinfer.viz import style
from specinfer.viz.description import Description
from specinfer.viz.side_by_side import PairDescription
from specinfer.viz.svg import HEIGHT

_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def fragment_of(description: Description | PairDescription, picture: str) -> str:
    """Return an element and a script that fills it, for a notebook or a page of one's own.

    Where scripts do not run, the picture and the plain text stay.  The picture is an image, not elements: what cleans
    the output of untrusted notebooks keeps images only.
    """
    data = in_script(description.to_dict())
    name = f"specinfer-{hashlib.sha256(data.encode()).hexdigest()[:16]}"
    call = f'fillAll("{name}", {in_script(_palette() + _looks() + _read("page.css"))}, {data});'
    script = f'(() => {{\n"use strict";\n{_scripts()}\n{call}\n}})();'
    source = f"data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"
    image = f'<img alt="{escape(description.title)}" src="{source}" style="max-width:100%;height:auto">'
    element = f'<div id="{name}" class="specinfer">{image}<pre>{escape(description.plain)}</pre></div>'
    return f"{element}\n<script>\n{script}\n</script>"


def page_of(description: Description | PairDescription, picture: str) -> str:
    """Return a complete HTML document."""
    template = Template(_read("page.html"))
    return template.substitute(title=escape(description.title), fragment=fragment_of(description, picture))


def to_json(data: object) -> str:
    """Return data as JSON on one line; NaN and infinities are errors."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def in_script(data: object) -> str:
    """Return data as JSON that may stand inside a script element: it is free of markup."""
    return to_json(data).translate(_ESCAPES)


def _palette() -> str:
    """Return the colours as variables of the style."""
    light, dark = ("".join(f"--{name}:{c};" for name, c in palette.items()) for palette in (style.LIGHT, style.DARK))
    return f'.root{{{light}}}\n:host([data-theme="dark"]) .root{{{dark}}}\n'


def _looks() -> str:
    """Return how nodes and the lines to them look, as rules of the style."""
    rules = [f".by{draft}{{--by:var(--by{draft})}}" for draft in range(len(style.BY_DRAFT))]
    rules += [f".edge{{stroke-width:calc({style.THIN_EDGE}px + {style.LIKELY_EDGE}px*var(--q,0))}}"]
    for state, node in style.STYLES.items():
        line, dashes = f"var(--{node.line or 'by'})", " ".join(map(str, node.dashes)) or "none"
        border = f"border:{node.width}px {'dashed' if node.dashes else 'solid'} {line}"
        box = f"background:var(--{node.fill});color:var(--{node.ink});border-radius:{node.corner * HEIGHT:.0f}px"
        rules.append(f".chip.{state}{{{border};{box};font-weight:{600 if node.width > 1 else 400}}}")
        rules.append(f".edge.{state}{{stroke:{line};stroke-dasharray:{dashes}}}")
    rules.append(f".edge.accepted,.edge.cut{{stroke-width:{style.ACCEPTED_EDGE}px}}")
    dashes = " ".join(map(str, style.BONUS_DASHES))
    rules.append(f".edge.bonus{{stroke-width:{style.BONUS_EDGE}px;stroke-dasharray:{dashes}}}")
    return "\n".join(rules) + "\n"


def _scripts() -> str:
    """Return all scripts, each of which works wherever it stands."""
    names = (file.name for file in files(__package__).joinpath("page").iterdir())
    return "\n".join(_read(name) for name in sorted(names) if name.endswith(".js"))


@cache
def _read(name: str) -> str:
    """Return a file of the page without indentation and comment lines, which would make each page larger."""
    text = files(__package__).joinpath("page", name).read_text(encoding="utf-8")
    return re.sub(r"(?m)^ *(//.*\n)?", "", text)
