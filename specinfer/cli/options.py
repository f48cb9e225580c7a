"""Options that several commands take: their names, their help, and how their values are read.

Knows: typer, how a list of numbers is written.  Does not know: what a command does with an option.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from specinfer.cli.terminal import loading, only_first_prints, quieten
from specinfer.errors import InputError

Number = TypeVar("Number")

PromptText = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")]
MaybePrompt = Annotated[str | None, typer.Argument(help="The prompt; - reads it from standard input.")]
PromptFiles = Annotated[
    list[Path] | None, typer.Option(help='JSON lines with "prompt", optionally "id" and "split"; a set each. Repeat.')
]
Prompts = Annotated[list[str] | None, typer.Option(help="A prompt. Repeat.")]
Target = Annotated[
    str | None, typer.Option(help="Target model, hub name or folder.", show_default="SmolLM2-135M-Instruct")
]
Drafts = Annotated[
    list[str] | None,
    typer.Option(
        help="A model, a trained head, mtp, suffix, recycling, lookahead, ngram, bundled or auto. Repeat to merge.",
        show_default="auto",
    ),
]
Tree = Annotated[str, typer.Option(help="auto, best-first, expansion, chain, sampled or none.")]
Nodes = Annotated[
    int | None,
    typer.Option(
        help="Drafted nodes per tree at most (auto; best-first, where paths below 5 % are left out).",
        show_default="31 or more auto, 16 best-first",
    ),
]
Depth = Annotated[
    int | None,
    typer.Option(
        help="Levels per tree at most (auto, best-first), or exactly (chain).",
        show_default="31 or more auto, 8 otherwise",
    ),
]
Expansion = Annotated[str, typer.Option(help="Children per level (expansion, sampled).")]
Count = Annotated[int, typer.Option(help="Prompts per file at most; 0 = all.", min=0)]
Split = Annotated[str, typer.Option(help="The rows taken, where rows have a split.")]
Batch = Annotated[int, typer.Option(help="Texts at a time.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 = greedy.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus; sampling only.", show_default="1.0")]
TopK = Annotated[
    int | None, typer.Option(help="0 = all tokens; sampling and contrastive search only.", show_default="50")
]
Seed = Annotated[
    int, typer.Option(help="Same seed, same text with any tree or none; in float32, and not with sampled trees.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quantize = Annotated[
    str | None, typer.Option(help="int8 or int4: round the models' weights, for compiled passes on a CPU.")
]
TensorParallel = Annotated[
    int,
    typer.Option(help="Processes that share the target: run under torchrun --nproc-per-node N -m specinfer.", min=1),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="auto: target layers that do not fit go to memory or disk, and are fetched in every pass."),
]
MaxMemory = Annotated[str | None, typer.Option(help="With --device-map auto: cpu=8GiB,0=20GiB (a GPU's number).")]
OffloadFolder = Annotated[
    Path | None, typer.Option(help="With --device-map: for layers that cannot be read from the checkpoint's files.")
]
Html = Annotated[Path | None, typer.Option(help="File for a page that shows every step.")]
Svg = Annotated[Path | None, typer.Option(help="File for a picture of one tree.")]
Raw = Annotated[bool, typer.Option("--raw", help="Feed the prompt as it is, without the chat template.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load_decoder(
    target: str | None,
    drafts: list[Any] | None,
    *,
    device_map: str | None = None,
    max_memory: str | None = None,
    offload_folder: Path | None = None,
    **options: Any,
) -> Any:
    """Load the models that the options name; return a decoder.  Further options are those of `from_pretrained`."""
    options |= placement(device_map, max_memory, offload_folder)
    compiling = ", and compiling passes" if options.get("compile") is True else ""
    with loading(f"{target or 'the models'}{compiling}"):
        from specinfer.decoder import SpeculativeDecoder

        quieten()
        if options.get("tensor_parallel", 1) > 1:
            only_first_prints()
        return SpeculativeDecoder.from_pretrained(target, drafts or "auto", **options)


def placement(device_map: str | None, max_memory: str | None, offload_folder: Path | None) -> dict[str, Any]:
    """Return the options of loading that say where the target's layers go."""
    given = {
        "device_map": device_map,
        "max_memory": max_memory and _sizes(max_memory),
        "offload_folder": offload_folder,
    }
    return {name: value for name, value in given.items() if value is not None}


def _sizes(text: str) -> dict[int | str, str]:
    """Return the size per device that `--max-memory` lists."""
    parts = [part.partition("=") for part in text.split(",")]
    if not all(device and size for device, _, size in parts):
        raise InputError(f"--max-memory {text!r} is not a list of sizes such as cpu=8GiB,0=20GiB")
    return {int(device) if device.isdecimal() else device: size for device, _, size in parts}


def listed(option: str, text: str, number: Callable[[str], Number], form: str) -> tuple[Number, ...]:
    """Return the numbers that an option lists; ``form`` says in the error what they should look like."""
    try:
        return tuple(map(number, text.split(",")))
    except ValueError:
        raise InputError(f"{option} {text!r} is not a list of {form}") from None


def expansion_widths(text: str) -> tuple[int, ...]:
    """Return the children per level that `--expansion` lists."""
    widths = listed("--expansion", text, int, "whole numbers such as 1,1,3")
    if min(widths) < 1:
        raise InputError(
            f"--expansion {text!r}: every level needs at least one child; leave levels out to stop earlier"
        )
    return widths
