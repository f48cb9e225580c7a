"""Write docs/api.md, the reference of what `import specinfer` and its parts offer: python docs/api.py

Everything comes from signatures and docstrings.
"""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from griffe import Docstring, DocstringSection

import specinfer
from specinfer import viz
from specinfer.common import display
from specinfer.evaluation import traces
from specinfer.viz import plots

PAGE = Path(__file__).with_name("api.md")
INTRODUCTION = """\
# API reference

What `import specinfer` offers, then what to import from its modules.  `docs/api.py` writes it from signatures and
docstrings: do not edit it by hand.
Shapes use B rows, N nodes, T tokens of a pass, V tokens of the vocabulary.
"""


def page() -> str:
    """Return the whole page."""
    homes = public()
    heads = headings(homes)
    links = {name: re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for name, head in heads.items()}
    contents = [f"- `{home}`: {', '.join(f'[{n}](#{links[n]})' for n in names)}" for home, names in homes.items()]
    entries = [
        line for names in homes.values() for name, thing in names.items() for line in entry(name, thing, heads[name])
    ]
    return "\n".join([INTRODUCTION, *contents, "", *entries]).rstrip() + "\n"


def headings(homes: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return each name's heading: with its module where another name has the same letters."""
    places = [(name, home) for home, names in homes.items() for name in names]
    lower = [name.lower() for name, _ in places]
    first = {letters: lower.index(letters) for letters in lower}
    return {n: n if first[n.lower()] == index else f"{n} in {home}" for index, (n, home) in enumerate(places)}


def public() -> dict[str, dict[str, Any]]:
    """Return everything by the module to import it from, and by name."""
    first = sorted(specinfer.__all__, key=lambda name: name != "SpeculativeDecoder")  # what readers come for
    homes: dict[str, dict[str, Any]] = {"specinfer": {name: getattr(specinfer, name) for name in first}}
    for name, module in specinfer._HOME.items():
        if name not in specinfer.__all__:
            homes.setdefault(module, {})[name] = getattr(import_module(module), name)
    drawings = ((viz, ["SideBySide"]), (plots, plots.__all__), (display, ["Displayed"]))
    for module, names in ((traces, traces.__all__), *drawings):
        homes.setdefault(module.__name__, {}).update({name: getattr(module, name) for name in names})
    return homes


def entry(name: str, thing: Any, heading: str) -> Iterator[str]:
    """Yield the lines about one public name, a class's own public methods and properties included."""
    yield from (f"## {heading}", "", "```py", call(name, thing), "```", "", *documented(thing))
    for attribute, member in vars(thing).items() if inspect.isclass(thing) else ():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if attribute.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if isinstance(member, property):
            yield from (f"**`{name}.{attribute}`** " + " ".join(documented(function)).strip(), "")
        else:
            yield from (f"**`{call(f'{name}.{attribute}', function)}`**", "", *documented(function))


def call(name: str, thing: Any) -> str:
    """Return a call as a reader would write it, without annotations' quotes and modules."""
    if inspect.isclass(thing) and (issubclass(thing, BaseException) or getattr(thing, "_is_protocol", False)):
        return f"class {name}"
    if is_typeddict(thing):
        keys = (f"    {key}: {typed(hint)}" for key, hint in get_type_hints(thing).items())
        return "\n".join([f"class {name}(TypedDict, total=False):", *keys])
    parameters = [p for p in inspect.signature(thing).parameters.values() if p.name not in ("self", "cls")]
    told = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    return name + re.sub("<function .*?>+ at 0x[0-9a-f]+>", "...", str(told))


def typed(hint: Any) -> str:
    """Return a type as its author would write it."""
    parts = [typed(part) for part in get_args(hint)]
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(parts)
    name = {NoneType: "None", ...: "..."}.get(hint) or hint.__name__
    return f"{name}[{', '.join(parts)}]" if parts else name


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
