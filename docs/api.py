"""Write docs/api.md, the reference of what `import specinfer` offers, from signatures and docstrings.

python docs/api.py
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Docstring, DocstringSection

import specinfer

PAGE = Path(__file__).with_name("api.md")
OPENING = """\
# API reference

What `import specinfer` offers, written by `docs/api.py` from signatures and docstrings: do not edit it by hand.
Shapes use B rows, N nodes, T tokens of a pass, V tokens of the vocabulary.
"""


def page() -> str:
    """Return the whole page."""
    homes: dict[str, list[str]] = {}
    for name in sorted(specinfer.__all__, key=lambda name: name != "SpeculativeDecoder"):  # what readers come for
        homes.setdefault(getattr(specinfer, name).__module__, []).append(name)
    contents = [f"- `{home}`: {', '.join(f'[{n}](#{n.lower()})' for n in names)}" for home, names in homes.items()]
    entries = [line for names in homes.values() for name in names for line in entry(name, getattr(specinfer, name))]
    return "\n".join([OPENING, *contents, "", *entries]).rstrip() + "\n"


def entry(name: str, thing: Any) -> Iterator[str]:
    """Yield the lines about one public name, a class's own public methods and properties included."""
    yield from (f"## {name}", "", "```python", shown(name, thing), "```", "", *documented(thing))
    for own, member in vars(thing).items() if inspect.isclass(thing) else ():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if own.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if isinstance(member, property):
            yield from (f"**`{name}.{own}`** " + " ".join(documented(function)).strip(), "")
        else:
            yield from (f"**`{shown(f'{name}.{own}', function)}`**", "", *documented(function))


def shown(name: str, thing: Any) -> str:
    """Return a call as a reader would write it, without annotations' quotes and modules."""
    if inspect.isclass(thing) and (issubclass(thing, BaseException) or getattr(thing, "_is_protocol", False)):
        return f"class {name}"
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
    call = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    return f"{name}({call})"


def documented(thing: Any) -> Iterator[str]:
    """Yield a docstring as Markdown."""
    for section in Docstring(inspect.getdoc(thing) or "", lineno=1).parse("google", warnings=False):
        yield from (*formatted(section), "")


def formatted(section: DocstringSection) -> Iterator[str]:
    """Yield one section: text as it is, anything else as a list under its title."""
    if section.kind.value == "text":
        yield section.value.replace("``", "`")
        return
    yield f"*{section.title or section.kind.value.capitalize()}*"
    yield ""
    for item in section.value:
        label = getattr(item, "name", "") or getattr(item, "annotation", "") or ""
        text = " ".join(item.description.split()).replace("``", "`")
        yield f"- `{label}`: {text}" if label else f"- {text}"


if __name__ == "__main__":
    PAGE.write_text(page())
