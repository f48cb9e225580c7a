"""Options that several commands take: their names, their help, and how their values are read.

Knows: typer, how a list of numbers is written.  Does not know: what a command does with an option.

A command takes groups of options, each as one object: `flattened` shows typer the options themselves.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from typer import Argument, Option

from specinfer.cli.terminal import loading, only_first_prints
from specinfer.common.advice import did_you_mean
from specinfer.common.files import checked_path, expanded, parse_json
from specinfer.errors import InputError, ModelError

if TYPE_CHECKING:
    from specinfer.decoder import SpeculativeDecoder
    from specinfer.engine.draft import Draft
    from specinfer.tree import Policy

    GrownBy = Callable[[], Policy | None]

Number = TypeVar("Number")

PATHS = ("/", "./", "../", "~/")  # beginnings of names that are of no hub

PromptText = Annotated[str, Argument(help="The prompt; - reads it from standard input.")]
MaybePrompt = Annotated[str | None, Argument(help="The prompt; - reads it from standard input.")]
PromptFiles = Annotated[
    list[Path] | None, Option(help='JSON lines with "prompt", optionally "id" and "split"; a set each. Repeat.')
]
Prompts = Annotated[list[str] | None, Option(help="A prompt. Repeat.")]
Target = Annotated[
    str | None, Option(help="Target model: hub name, folder or GGUF file.", show_default="SmolLM2-135M-Instruct")
]
Count = Annotated[int, Option(help="Prompts per file at most; 0 = all.", min=0)]
Split = Annotated[str, Option(help="The rows taken, where rows have a split.")]
Batch = Annotated[int, Option(help="Texts at a time.")]
NewTokens = Annotated[int, Option("--max-new-tokens", help="New tokens at most.")]
Temperature = Annotated[float, Option(help="0 = greedy.")]
Seed = Annotated[
    int, Option(help="Same seed, same text with any tree or none; in float32, and not with sampled trees.")
]
Quantize = Annotated[str | None, Option(help="int8 or int4: round the models' weights, on a CPU.")]
Activations = Annotated[
    str | None,
    Option(help="int8: products with the target's packed weights round states to 8 bits.", show_default="16 bits"),
]
TensorParallel = Annotated[
    int, Option(help="Processes that share the target: run under torchrun --nproc-per-node N -m specinfer.", min=1)
]
Html = Annotated[Path | None, Option(help="File for a page that shows every step.", dir_okay=False)]
Svg = Annotated[Path | None, Option(help="File for a picture of one tree.", dir_okay=False)]
Raw = Annotated[bool, Option("--raw", help="Feed the prompt as it is, without the chat template.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]


@dataclass(frozen=True)
class Device:
    """How models are loaded."""

    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")] = "auto"

    def loading(self) -> dict[str, Any]:
        """Return the options of loading that have a value."""
        found = {name: value for name, value in asdict(self).items() if value is not None}
        return found | ({"max_memory": _sizes(found["max_memory"])} if "max_memory" in found else {})


@dataclass(frozen=True)
class Layers(Device):
    """How models are loaded, and where the target's layers go."""

    device_map: Annotated[
        str | None,
        Option(help="auto: target layers that do not fit go to memory or disk, and are fetched in every pass."),
    ] = None
    max_memory: Annotated[str | None, Option(help="With --device-map auto: cpu=8GiB,0=20GiB (a GPU's number).")] = None
    offload_folder: Annotated[
        Path | None, Option(help="With --device-map: for layers that cannot be read from the checkpoint's files.")
    ] = None


@dataclass(frozen=True)
class Names:
    """A target and its drafts, by name."""

    target: Target = None
    draft: Annotated[
        list[str] | None,
        Option(
            help="A model, a trained head, mtp, suffix, recycling, lookahead, ngram, bundled or auto. Repeat to merge.",
            show_default="auto",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_paths(self.target, *(self.draft or ()))


@dataclass(frozen=True)
class Pair(Device, Names):
    """A target and its drafts, and how they are loaded."""

    def decoder(self, **options: Any) -> "SpeculativeDecoder":
        """Load both; return a decoder.  Options: see `load_decoder`."""
        loading = self.loading()
        return load_decoder(loading.pop("target", None), loading.pop("draft", None), **loading, **options)


@dataclass(frozen=True)
class Models(Layers, Pair):
    """A target and its drafts, and all ways to load them."""

    quantize: Quantize = None
    activations: Activations = None


@dataclass(frozen=True)
class Trees:
    """A growth policy."""

    tree: Annotated[str, Option(help="auto, best-first, expansion, chain, sampled or none.")] = "auto"
    nodes: Annotated[
        int | None,
        Option(
            help="Drafted nodes per tree at most (auto; best-first, where paths below 5 % are left out).",
            show_default="31 or more auto, 16 best-first",
        ),
    ] = None
    depth: Annotated[
        int | None,
        Option(
            help="Levels per tree at most (auto, best-first), or exactly (chain).",
            show_default="31 or more auto, 8 otherwise",
        ),
    ] = None
    expansion: Annotated[str, Option(help="Children per level (expansion, sampled).")] = "3,2,1,1"

    def policy(self, profile: Path | None = None) -> "Policy | None":
        """Return the policy, or None for no speculation; auto begins with what a file says that it learnt."""
        from specinfer.adaptive.policy import Auto
        from specinfer.decoder import DEFAULT_TREE
        from specinfer.tree import BestFirst, Chain, Expansion, Sampled

        for name, value in (("nodes", self.nodes), ("depth", self.depth)):
            if value is not None and value < 1:
                raise InputError(f"--{name} {value} drafts nothing: give at least 1, or --tree none")
        widths, levels = expansion_widths(self.expansion), self.depth or DEFAULT_TREE.max_depth
        makers: dict[str, GrownBy] = {
            "auto": lambda: Auto(self.nodes, self.depth, profile),
            "best-first": lambda: BestFirst(self.nodes or DEFAULT_TREE.max_nodes, levels, DEFAULT_TREE.min_probability),
            "expansion": lambda: Expansion(widths),
            "chain": lambda: Chain(levels),
            "sampled": lambda: Sampled(widths),
            "none": lambda: None,
        }
        if self.tree not in makers:
            advice = did_you_mean(self.tree, makers, f"choose {', '.join(makers)}")
            raise InputError(f"--tree {self.tree!r} is unknown: {advice}")
        return makers[self.tree]()


@dataclass(frozen=True)
class Sampling:
    """How much text, and how its tokens are chosen."""

    max_new_tokens: NewTokens = 128
    temperature: Temperature = 0.0
    top_p: Annotated[float | None, Option(help="Nucleus; sampling only.", show_default="1.0")] = None
    top_k: Annotated[
        int | None, Option(help="0 = all tokens; sampling and contrastive search only.", show_default="50")
    ] = None
    seed: Seed = 0


@dataclass(frozen=True)
class Form:
    """What the text may be."""

    json_schema: Annotated[Path | None, Option(help="File of a JSON schema that the text follows.")] = None
    grammar: Annotated[Path | None, Option(help="File of a grammar in llguidance's form of Lark, likewise.")] = None
    regex: Annotated[str | None, Option(help="Regex that the whole text matches.")] = None
    choice: Annotated[list[str] | None, Option(help="A text that is allowed. Repeat.")] = None

    def asked(self) -> dict[str, object]:
        """Return the options of a call; raise `InputError` for a file that cannot be read."""
        found: dict[str, object] = {"regex": self.regex, "choices": self.choice or None}
        if self.grammar:
            found["grammar"] = read_text("--grammar", self.grammar)
        if self.json_schema:
            text = read_text("--json-schema", self.json_schema)
            try:
                schema = parse_json(text)
            except ValueError as error:
                raise InputError(f"--json-schema {self.json_schema} is not JSON ({error!s:.100})") from error
            found["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        return {name: value for name, value in found.items() if value is not None}


def read_text(option: str, file: Path) -> str:
    """Return the text of an option's file; raise `InputError` for one that cannot be read."""
    try:
        return checked_path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{option} {file} cannot be read ({reason}): give a file of text") from error


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of its groups one by one; their defaults are those of the group given."""
    parameters, groups = list[Parameter](), dict[str, Any]()
    for parameter in signature(command).parameters.values():
        hints, given = {parameter.name: parameter.annotation}, {parameter.name: parameter.default}
        if is_dataclass(parameter.annotation):
            group = groups[parameter.name] = parameter.annotation
            default = groups[parameter.name]() if parameter.default is Parameter.empty else parameter.default
            hints = get_type_hints(group, include_extras=True)
            given = {field.name: getattr(default, field.name) for field in fields(group)}
        kind = Parameter.KEYWORD_ONLY
        parameters += [Parameter(name, kind, default=given[name], annotation=hints[name]) for name in given]

    @wraps(command)
    def flat(**given: object) -> None:
        given = {name: _expanded(value) for name, value in given.items()}
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    flat.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _expanded(value: object) -> object:
    """Return an option's value, with ~ expanded in paths."""
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return expanded(value) if isinstance(value, Path) else value


def chosen(given: Mapping[str, object], names: str) -> dict[str, Any]:
    """Return those of a command's options that have one of the names and a value."""
    return {name: given[name] for name in names.split() if given[name] is not None}


def load_decoder(
    target: str | None,
    drafts: "Sequence[str | Draft] | None",
    grown: "Callable[[], Policy | None] | None" = None,
    **options: Any,
) -> "SpeculativeDecoder":
    """Load models; return a decoder.

    Args:
        target, drafts: None means the default.
        grown: returns the growth policy; None leaves the default.
        **options: of `SpeculativeDecoder.from_pretrained`.
    """
    compiling = ", and compiling passes" if options.get("compile") is True else ""
    with loading(f"{target or 'the models'}{compiling}"):
        from specinfer.decoder import SpeculativeDecoder

        if grown is not None:
            options["tree"] = grown()
        if options.get("tensor_parallel", 1) > 1:
            only_first_prints()
        return SpeculativeDecoder.from_pretrained(target, drafts or "auto", **options)


def check_paths(*models: str | None) -> None:
    """Raise `ModelError` for a model's path that does not exist: at once, where importing torch takes seconds."""
    for model in filter(None, models):
        is_path = model.startswith(PATHS) or model.endswith(".gguf")
        if is_path and not os.path.exists(os.path.expanduser(model)):
            raise ModelError(f"cannot load {model}: there is no such file or folder")


def _sizes(text: str) -> dict[int | str, str]:
    """Return the size per device that `--max-memory` lists."""
    parts = [part.partition("=") for part in text.split(",")]
    if not all(device and size for device, _, size in parts):
        raise InputError(f"--max-memory {text!r} is not a list of sizes like cpu=8GiB,0=20GiB")
    return {int(device) if device.isdecimal() else device: size for device, _, size in parts}


def numbers(option: str, text: str, number: Callable[[str], Number], form: str) -> tuple[Number, ...]:
    """Return the numbers that an option lists; ``form`` says in the error what they should look like."""
    try:
        return tuple(map(number, text.split(",")))
    except ValueError:
        raise InputError(f"{option} {text!r} is not a list of {form}") from None


def expansion_widths(text: str) -> tuple[int, ...]:
    """Return the children per level that `--expansion` lists."""
    widths = numbers("--expansion", text, int, "whole numbers like 1,1,3")
    if min(widths) < 1:
        raise InputError(f"--expansion {text!r}: every level needs a child; leave levels out to stop earlier")
    return widths
