"""Options that several commands take, declared once: names, help, defaults as shown."""

from pathlib import Path
from typing import Annotated

import typer

PromptArgument = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")]
PromptsOption = Annotated[
    list[Path] | None, typer.Option(help='JSON lines with "prompt", optionally "id" and "split"; a set each. Repeat.')
]
PromptOption = Annotated[list[str] | None, typer.Option(help="A prompt. Repeat.")]
TargetOption = Annotated[
    str | None, typer.Option(help="Target model, hub name or folder.", show_default="SmolLM2-135M-Instruct")
]
DraftOption = Annotated[
    list[str] | None,
    typer.Option(help="A model, a trained head, ngram, bundled or auto. Repeat to merge.", show_default="auto"),
]
TreeOption = Annotated[str, typer.Option(help="auto, best-first, expansion, chain, sampled or none.")]
NodesOption = Annotated[
    int | None,
    typer.Option(
        help="Drafted nodes per tree at most (auto; best-first, where paths below 5 % are left out).",
        show_default="23 auto, 16 best-first",
    ),
]
DepthOption = Annotated[int, typer.Option(help="Levels per tree at most (auto, best-first), or exactly (chain).")]
ExpansionOption = Annotated[str, typer.Option(help="Children per level (expansion, sampled).")]
CountOption = Annotated[int, typer.Option(help="Prompts per file at most.", min=1)]
SplitOption = Annotated[str, typer.Option(help="The rows taken, where rows have a split.")]
TokensOption = Annotated[int, typer.Option("--max-new-tokens", help="New tokens at most.")]
TemperatureOption = Annotated[float, typer.Option(help="0 = greedy.")]
TopPOption = Annotated[float | None, typer.Option(help="Nucleus; sampling only.", show_default="1.0")]
TopKOption = Annotated[int | None, typer.Option(help="0 = all tokens; sampling only.", show_default="50")]
SeedOption = Annotated[
    int, typer.Option(help="Same seed, same text with any tree or none; in float32, and not with sampled trees.")
]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
RawOption = Annotated[bool, typer.Option("--raw", help="Feed the prompt as it is, without the chat template.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
