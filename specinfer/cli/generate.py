"""``specinfer generate`` and ``specinfer tree``: text as it is written, files of prompts, and the tree of one step.

Knows: options, standard input and output.  Does not know: how text is decoded.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, TextIO

from typer import Option

from specinfer.cli import options
from specinfer.cli.terminal import INTERRUPTED, loading, print_json, resumable
from specinfer.common.progress import Bars, busy, close_bars
from specinfer.errors import InputError

if TYPE_CHECKING:
    from specinfer.calls.text_stream import TextStream
    from specinfer.decoder import SpeculativeDecoder
    from specinfer.drafts.lookup.memory import Memory
    from specinfer.results import Result

BEST = "best"  # word for a step
BEST_FIRST, SHORT = options.Trees(tree="best-first"), options.Sampling(max_new_tokens=32)
UNFINISHED = "unfinished"  # a result's end, if it was interrupted


@dataclass(frozen=True)
class Learning:
    """Files in which a text leaves something for later ones."""

    profile: Annotated[
        Path | None,
        Option(
            help="File of what auto learnt: used if it exists, so that runs repeat; otherwise written.", dir_okay=False
        ),
    ] = None
    memory: Annotated[
        Path | None,
        Option(
            help="File of texts to draft from: read if it exists, and written with this text added.", dir_okay=False
        ),
    ] = None
    online: Annotated[bool, Option("--online", help="Heads learn from the text, after it.")] = False
    save_drafts: Annotated[
        Path | None, Option(help="With --online: write what heads have learnt; --draft reads it.", file_okay=False)
    ] = None

    def texts(self) -> "Memory | None":
        """Return the texts to draft from."""
        from specinfer.drafts.lookup.memory import Memory

        if self.memory is None:
            return None
        return Memory.load(self.memory) if self.memory.exists() else Memory()

    def keep(self, decoder: "SpeculativeDecoder", known: Path | None) -> None:
        """Write the profile, memory and drafts; a profile that was known stays as it is."""
        from specinfer.adaptive.policy import Auto

        if self.profile and not known and isinstance(decoder.policy, Auto):
            decoder.policy.save(self.profile)
            print(f"profile: wrote {self.profile}; the next runs start from it", file=sys.stderr)
        if self.memory and decoder.memory:
            decoder.memory.save(self.memory)
        if self.save_drafts:
            decoder.save_drafts(self.save_drafts)


@dataclass(frozen=True)
class Output:
    """Where a result goes, and how much of it."""

    show_tree: Annotated[bool, Option("--show-tree", help="Draw the tree that gained most.")] = False
    save: Annotated[
        Path | None, Option(help="File for the result, which specinfer.Result.load reads.", dir_okay=False)
    ] = None
    html: options.Html = None
    svg: options.Svg = None
    as_json: options.Json = False
    steps: Annotated[bool, Option("--steps", help="With --json: also every step and its tree.")] = False
    logprobs: Annotated[
        bool, Option("--logprobs", help="With --json or --save: the target's log-probability of each new token.")
    ] = False

    def write(self, result: "Result") -> None:
        """Write and print a result."""
        for path, write in ((self.save, result.save), (self.html, result.to_html), (self.svg, result.to_svg)):
            if path:
                write(path)
        if self.as_json:
            steps = {"steps": [step.to_dict() for step in result.steps]} if self.steps else {}
            print_json(result.to_dict() | steps)
            return
        print("\n", end="", flush=True)
        print(file=sys.stderr)
        print_stats(result, sys.stderr)
        if self.show_tree:
            print(f"\n{drawn(result, step_index(BEST, result))}")


def generate(
    prompt: options.MaybePrompt = None,
    prompts: Annotated[
        list[Path] | None,
        Option(help='In place of a prompt, files: JSON lines with "prompt", optionally "id" and "options". Repeat.'),
    ] = None,
    out: Annotated[Path | None, Option(help="With --prompts: folder for results; the same command resumes.")] = None,
    max_rows: Annotated[int, Option(help="With --prompts: texts at a time.", min=1)] = 16,
    *,
    models: options.Models,
    trees: options.Trees,
    sampling: options.Sampling,
    form: options.Form,
    penalty_alpha: Annotated[
        float | None, Option(help="Contrastive search among --top-k candidates, with this penalty (0.6, for example).")
    ] = None,
    confidence_gate: Annotated[
        float | None, Option(help="Draft only after tokens to which the target gave at least this probability.")
    ] = None,
    learning: Learning,
    tensor_parallel: options.TensorParallel = 1,
    raw: options.Raw = False,
    output: Output,
) -> None:
    """Generate text, streamed, with a summary of what speculation did; or for whole files, into a folder."""
    _check_combination(SimpleNamespace(**locals(), **vars(learning), **vars(output)))
    text = "" if prompt is None else read_prompt(prompt, tensor_parallel)
    asked = asdict(sampling) | form.asked() | {"raw": raw, "penalty_alpha": penalty_alpha}
    with loading():
        if prompts:
            from specinfer.batch import generate_files, read_prompts

            lines = read_prompts(prompts)
        texts = learning.texts()
    known = learning.profile if learning.profile and learning.profile.exists() else None
    decoder = models.decoder(
        grown=lambda: trees.policy(known),
        tensor_parallel=tensor_parallel,
        confidence_gate=confidence_gate,
        online=learning.online,
        memory=texts,
    )
    if out:
        with resumable(out):
            summary = generate_files(decoder, lines, out, max_rows=max_rows, progress=Bars(), **asked)
        print_json(summary.to_dict()) if output.as_json else print(summary)
        learning.keep(decoder, known)
        return
    result = streamed(decoder.stream(text, **asked, logprobs=output.logprobs), quiet=output.as_json)
    if not decoder.target.ranks.is_first:
        return
    interrupted = result.finish_reason == UNFINISHED
    output.write(result)
    learning.keep(decoder, known or (learning.profile if interrupted else None))
    if interrupted:
        raise SystemExit(INTERRUPTED)


def _check_combination(given: SimpleNamespace) -> None:
    """Raise `InputError` for options that do not go together."""
    if (given.prompt is None) == (not given.prompts):
        raise InputError("give either a prompt, or --prompts FILE and --out DIR")
    if bool(given.prompts) != (given.out is not None):
        raise InputError("--prompts FILE and --out DIR go together: many texts are written to a folder")
    if given.prompts and given.tensor_parallel > 1:
        raise InputError("--prompts is read by one process: leave out --tensor-parallel, or give one prompt")
    if given.prompts and given.show_tree:
        raise InputError("--show-tree draws the tree of one text: give one prompt, or leave it out")
    if given.as_json and given.show_tree:
        raise InputError("--show-tree draws beside the text, and --json --steps has every tree: leave one out")
    if given.steps and not given.as_json:
        raise InputError("--steps belongs to --json: add that, or draw a tree with --show-tree")
    if given.prompts and (given.save or given.html or given.svg or given.logprobs):
        raise InputError("--save, --html, --svg and --logprobs need one prompt's result: leave them out for many")
    if given.logprobs and not (given.as_json or given.save):
        raise InputError("--logprobs are not part of the text: add --json, which prints them, or --save FILE")
    if given.profile and given.trees.tree != "auto":
        raise InputError(
            f"--profile keeps what --tree auto learns, and --tree {given.trees.tree} learns nothing: leave one out"
        )
    if given.save_drafts and not given.online:
        raise InputError("--save-drafts writes what heads have learnt, and nothing learns: add --online")


def streamed(stream: "TextStream", quiet: bool) -> "Result":
    """Print the pieces of a text as they come; return the result, cut off where Ctrl-C is pressed."""
    printed = 0
    with busy("generating"):
        try:
            for piece in stream:
                if not quiet:
                    close_bars()
                    print(piece, end="", flush=True)
                    printed += len(piece)
        except KeyboardInterrupt:
            stream.close()
            if not stream.result.steps:
                raise
    if not quiet:
        print(stream.result.text[printed:], end="")
    return stream.result


def print_stats(result: "Result", file: TextIO) -> None:
    """Print the figures of a result, with notes on them."""
    stats = result.stats
    print(stats, *stats.drafts, *(f"note: {note}" for note in stats.notes), sep="\n", file=file, flush=True)


def tree(
    prompt: options.PromptText,
    *,
    models: options.Models,
    trees: options.Trees = BEST_FIRST,
    sampling: options.Sampling = SHORT,
    step: Annotated[str, Option(help="Number of a step, or best: the one that gained most.")] = BEST,
    tensor_parallel: options.TensorParallel = 1,
    raw: options.Raw = False,
    html: options.Html = None,
    svg: options.Svg = None,
    as_json: options.Json = False,
) -> None:
    """Draw the tree of one step of a text: what was drafted, and what became of it."""
    check_step(step)
    text = read_prompt(prompt, tensor_parallel)
    decoder = models.decoder(grown=trees.policy, tensor_parallel=tensor_parallel)
    with busy("generating"):
        result = decoder.generate(text, raw=raw, **asdict(sampling))
    if not decoder.target.ranks.is_first:
        return
    number = step_index(step, result)
    if html:
        result.to_html(html)
    if svg:
        result.steps[number].to_svg(svg)
    print_json({"step": number + 1, **result.steps[number].to_dict()}) if as_json else print(drawn(result, number))


def check_step(step: str) -> None:
    """Raise `InputError` for a word that is neither a step's number nor the one for the best step."""
    if step != BEST and (not step.isdecimal() or int(step) < 1):
        raise InputError(f"step {step!r} does not exist: give a number from 1 on, or {BEST}")


def step_index(step: str, result: "Result") -> int:
    """Return the number, from 0, of the step that was asked for; raise `InputError` if there is none."""
    from specinfer.results import best_step

    check_step(step)
    if step == BEST:
        return best_step(result.steps)
    if int(step) > (count := len(result.steps)):
        raise InputError(f"step {step}: the text has {count} steps; ask for more tokens, or for an earlier one")
    return int(step) - 1


def read_prompt(prompt: str, processes: int) -> str:
    """Return the prompt, from standard input if it is "-"."""
    if prompt == "-" and processes > 1:
        advice = "and one standard input: give the prompt"
        raise InputError(f"--tensor-parallel {processes} starts {processes} processes, {advice}")
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()  # bytes that are not text may arrive as halves of surrogate pairs
    except UnicodeError as error:
        source = "standard input" if prompt == "-" else "the prompt"
        raise InputError(f"{source} is not text in UTF-8 ({error}): convert it first") from error
    if not text.strip():
        raise InputError("the prompt is empty: there is nothing to continue")
    return text


def drawn(result: "Result", number: int) -> str:
    """Draw one step's tree with its accepted path and bonus token, as standard output can show it."""
    from specinfer import viz

    step = result.steps[number]
    gained = f"{len(step.path)} of {step.tree.num_drafted} drafted tokens accepted on a path"
    return f"step {number + 1}: {gained}\n{viz.text(result, sys.stdout, step=number)}"
