"""Run the benchmarks that the pages quote, keep what they found in docs/figures/, and write it into the pages.

    make figures                         everything; `FAST=1` takes fewer prompts, and less than 15 minutes
    python benchmarks/figures.py [NAME ...] [--fast] [--pages]

Each figure is some runs of scripts of this folder.  A run's rows go to docs/figures/NAME.json, with command, machine,
versions, commit and date; from there the block between `<!-- figure: NAME -->` and `<!-- end -->` of a page is written,
and a plot for light pages and one for dark ones.  ``--pages`` does only that.  What is needed besides the default
target and its compiled passes comes from the environment; a run without it is named, and its figures stay:

    FIGURES_MODELS    a folder: smollm2-135m.gguf, smollm2-135m-bf16.gguf (`llama-quantize` makes it),
                      qwen2.5-coder-0.5b.gguf and -1.5b.gguf; folders qwen2.5-coder-0.5b and -1.5b in bfloat16;
                      3B-random.gguf and 8B-random.gguf (`shapes.py` writes them)
    FIGURES_LLAMA     a folder with llama.cpp's programs: llama-server

Run it on a quiet machine.  Knows: commands, files, pages.  Does not know: how anything is measured.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"(?<=<!-- figure: )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.S)
PLACES = {"MODELS": "FIGURES_MODELS", "LLAMA": "FIGURES_LLAMA"}  # words of commands, and variables of the environment
FEATURES = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
SLOW = ("passes-larger",)  # figures that --fast leaves out, unless it names them
NODES = "1", "2", "4", "8", "16", "24", "32"
Row = dict[str, Any]


class Run(NamedTuple):
    """A command; ``fast`` are options that make it short."""

    script: str
    options: str
    fast: str = ""

    def command(self, fast: bool) -> str:
        """Return it as the pages show it."""
        parts = ["python", f"benchmarks/{self.script}", self.options, self.fast if fast else ""]
        return " ".join(filter(None, parts))


class Figure(NamedTuple):
    """Runs by label, and how their rows are written.

    Attributes:
        runs: rows of the table begin with the label, if there are several.
        columns: headings, and formats of a row; a cell is empty where a row lacks what its format names.
        names: what stands for values of the first column; it may be a format of a row.
        notes: formats of sentences, for each row that has what they name.
        across: the format whose values become columns, of cells in the second format of ``columns``.
        plot: draws all rows in the colours of a palette.
        alt: what the plot shows, for those who do not see it.
        lacks: a feature of processors (`FEATURES`): where it is there, nothing is measured.
    """

    runs: dict[str, Run]
    columns: Mapping[str, str] = MappingProxyType({})
    names: Mapping[str, str] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    across: str = ""
    plot: Callable[[Any, list[Row], dict[str, str]], None] | None = None
    alt: str = ""
    lacks: str = ""


def plot_passes(ax: Any, rows: list[Row], palette: dict[str, str]) -> None:
    """Draw milliseconds by nodes for each target, beside its bound."""
    from specinfer.viz.plots.axes import DRAFTS

    labels = list(dict.fromkeys(row["run"] for row in rows))
    for row in rows:
        number = labels.index(row["run"])
        colour, mark = palette[f"by{number}"], DRAFTS[number][1]
        if row["pass"] == "engine":
            times = {int(count): row[f"{count} nodes"] for count in NODES}
            ax.plot([*times], [*times.values()], mark + "-", color=colour, label=row["run"])
        elif row["pass"] == "bound":
            ax.axhline(row["1 nodes"], color=colour, ls=":", lw=1.2)
    ax.set(xlabel="nodes", ylabel="ms of a pass (dotted: the bound)", yscale="log", xticks=[*map(int, NODES)])


def plot_speed(ax: Any, rows: list[Row], palette: dict[str, str]) -> None:
    """Draw tokens a second of each target by each method."""
    labels = list(dict.fromkeys(row["run"] for row in rows))
    methods = list(dict.fromkeys(kind(row) for row in rows))
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        mine = [row for row in rows if kind(row) == method]
        left = [labels.index(row["run"]) + width * (number - (len(methods) - 1) / 2) for row in mine]
        bars = ax.bar(
            left,
            [row["tokens/s"] for row in mine],
            width,
            color=palette[f"by{number}"],
            label=METHODS[method].replace("`", ""),
        )
        ax.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    ax.set_xticks(range(len(labels)), [label.replace(", ", "\n") for label in labels])
    ax.set(ylabel="tokens/s")


def kind(row: Row) -> str:
    """Return a method without the file that it reads."""
    return row["method"].split()[0]


ALL = "--prompts prompts/*.jsonl"
SOME = "--prompts prompts/code.jsonl prompts/chat.jsonl prompts/math.jsonl prompts/extraction.jsonl"
THREE, SMALL, LARGE = "--methods auto plain generate", "MODELS/smollm2-135m", "MODELS/qwen2.5-coder-1.5b"
BRIEF = "--count 4 --max-new-tokens 32"
METHODS = {
    "auto": '`tree="auto"`',
    "plain": "no speculation",
    "generate": "transformers `generate`",
    "llama": "llama.cpp",
    "llama-ngram": "llama.cpp, its n-grams",
    "llama-draft": "llama.cpp, the same draft",
    "int8 activations auto": '`tree="auto"`, activations in 8 bits',
    "int8 activations plain": "no speculation, activations in 8 bits",
}
GAIN = "{ratio:.2f} [{low:.2f}, {high:.2f}]"


def large(form: str) -> Run:
    """Return the run of the larger target, from a file or from a folder."""
    models = f"--target {LARGE}{form} --draft MODELS/qwen2.5-coder-0.5b{form}"
    file = form or "-bf16.gguf"
    llama = f"--llama LLAMA {LARGE}{file} --llama-methods llama llama-ngram llama-draft"
    llama += f" --llama-draft MODELS/qwen2.5-coder-0.5b{file}"
    options = f"{SOME} --count 8 --max-new-tokens 128 {models} {THREE} {llama} --json"
    return Run("peers.py", options, "--count 2 --max-new-tokens 16")


FIGURES = {
    "speed": Figure(
        {
            "135M, bfloat16": Run("peers.py", f"{ALL} {THREE} --llama LLAMA {SMALL}-bf16.gguf --json", BRIEF),
            "135M, bfloat16, T = 1": Run("peers.py", f"{ALL} --temperature 1 {THREE} --json", BRIEF),
            "135M, Q4_1": Run(
                "peers.py", f"{ALL} --target {SMALL}.gguf {THREE} --llama LLAMA {SMALL}.gguf --json", BRIEF
            ),
            "1.5B, bfloat16": large(""),
            "1.5B, Q4_K_M": large(".gguf"),
        },
        {
            "": "{method}",
            "tokens/s": "{tokens/s:.1f}",
            "`auto` is faster by": GAIN,
            "worst prompt": "{worst:.2f}",
            "tokens per pass": "{tokens/pass:.2f}",
            "the same ids": "{same ids} of {prompts}",
        },
        METHODS,
        plot=plot_speed,
        alt="Tokens a second by target, file and method: the numbers of the table above",
    ),
    "passes": Figure(
        {
            "135M, bfloat16": Run("passes.py", "--rounds 9 --json", "--rounds 2"),
            "135M, Q4_1": Run("passes.py", f"--rounds 9 --target {SMALL}.gguf --json", "--rounds 2"),
            "1.5B, bfloat16": Run("passes.py", f"--rounds 9 --target {LARGE} --json", "--rounds 2"),
            "1.5B, Q4_K_M": Run("passes.py", f"--rounds 9 --target {LARGE}.gguf --json", "--rounds 2"),
        },
        {"nodes": "{pass}", **{count: f"{{{count} nodes:.1f}}" for count in NODES}},
        {
            "plain": "the model as it is",
            "engine": "compiled",
            "plain level": "a level of the head, as it is",
            "level": "a level of the head",
            "bound": "bound: {MB:.0f} MB at {GB/s:.1f} GB/s",
        },
        plot=plot_passes,
        alt="Milliseconds of a pass by nodes, with the time that reading the weights takes",
    ),
    "batches": Figure(
        {
            "": Run(
                "many.py", f"{ALL} --rounds 5 {THREE} --json", "--count 16 --rounds 1 --rows 1 4 16 --max-new-tokens 32"
            )
        },
        {
            "rows at a time": "{rows}",
            "`auto`, tokens/s": "{auto:.0f}",
            "no speculation": "{plain:.0f}",
            "ratio": "{ratio:.2f}",
            "`generate`, padded": "{generate:.0f}",
        },
    ),
    "context": Figure(
        {
            "": Run(
                "growth.py",
                f"{ALL} --parts context --context docs/how-it-works.md docs/choosing.md --minutes 6 --json",
                "--minutes 0.5",
            )
        },
        {
            "context, tokens": "{context:,}",
            "`auto`, tokens/s": "{auto:.1f}",
            "no speculation": "{plain:.1f}",
            "ratio": "{auto / plain:.2f}",
            "worst text": "{worst:.2f}",
            "tokens per pass": "{tokens/pass:.2f}",
            "reading the prompt, s": "{auto prompt s:.2f}",
        },
    ),
    "serving": Figure(
        {
            "ours": Run(
                "serving.py",
                f'{SOME} --rounds 2 --start "auto=python -m specinfer serve --port PORT" '
                '--start "plain=python -m specinfer serve --port PORT --tree none" --json',
                "--count 8 --max-new-tokens 32 --rounds 1 --clients 1 8",
            ),
            "llama.cpp": Run(
                "serving.py",
                f'{SOME} --rounds 2 --json --start "llama=LLAMA/llama-server '
                f'--model {SMALL}-bf16.gguf --parallel 16 --ctx-size 32768 --port PORT"',
                "--count 8 --max-new-tokens 32 --rounds 1 --clients 1 8",
            ),
        },
        {
            "server": "{server}",
            "clients": "{clients}",
            "tokens/s": "{tokens/s:.1f}",
            "first token, ms: median, 99 %": "{first:,}, {first p99:,}",
            "between events, ms: median, 99 %": "{between}, {between p99}",
        },
        METHODS,
    ),
    "turns": Figure(
        {"": Run("turns.py", "--new 16 --json", "--rounds 2")},
        notes=(
            "The second turn of a chat of {prompt tokens:,} tokens, of which the first turn had read {read before:,}, "
            "has its first token after {ms:,.0f} ms, and after {ms again:,.0f} ms if all is read again: {ratio:.3f} of "
            "the time ({most:.3f} at most in a round), with the same ids.",
        ),
    ),
    "structured": Figure(
        {"": Run("structured.py", "--max-new-tokens 200", "--max-new-tokens 32 --dtype bfloat16")},
        {
            "": "{form}, {decoding}",
            "tokens in all": "{tokens}",
            "no speculation": "{plain}",
            "drafts": "{drafts}",
            "drafts and grammar draft": "{drafts and grammar}",
            "grammar draft alone": "{grammar}",
        },
        notes=(
            "Milliseconds: {tokenizer:.0f} to read the tokenizer, once; {compile} to compile a schema; {mask} for a "
            "mask and the way to it; {draft a step} for the grammar draft in a step.",
        ),
    ),
    "memory": Figure(
        {
            "135M, bfloat16": Run("memory.py", f"{ALL} --count 200 --max-new-tokens 8", "--count 50"),
            "135M, Q4_1": Run("memory.py", f"{ALL} --target {SMALL}.gguf --count 200 --max-new-tokens 8", "--count 50"),
            "1.5B, Q4_K_M": Run(
                "memory.py",
                f"{ALL} --target {LARGE}.gguf --draft MODELS/qwen2.5-coder-0.5b.gguf --count 50 --max-new-tokens 8",
                "--count 8",
            ),
        },
        {
            "weights, MiB": "{weights:.0f}",
            "process, models read": "{read:.0f}",
            "after a call": "{first:.0f}",
            "after all": "{last:.0f}",
            "calls": "{calls}",
            "at most": "{peak:.0f}",
        },
    ),
    "start": Figure(
        {"": Run("start.py", "--json", "--rounds 2")},
        notes=(
            "`specinfer generate` writes its first byte after {specinfer:.2f} s, {ratio:.2f} times as long as it takes "
            "Python to import torch and transformers and to load the same folder.",
        ),
    ),
    "identity": Figure(
        {
            "": Run(
                "identity.py",
                f"{ALL} --draft auto --count 8 --max-new-tokens 32 --sampling --dtype bfloat16",
                "--count 4 --max-new-tokens 16",
            )
        },
        {"": "{method}", "the same ids": "{equal} of {prompts}"},
        across="{distribution}",
    ),
    "drafts": Figure(
        {
            "": Run(
                "drafts.py",
                f"{ALL} --drafts ngram suffix recycling suffix+recycling lookahead bundled bundled+ngram --json",
                BRIEF,
            )
        },
        {
            "drafts, tree": "{drafts}",
            "tokens per pass": "{tokens/pass:.2f}",
            "nodes a step": "{nodes:.1f}",
            "drafting, ms a step": "{ms:.1f}",
            "against no speculation": GAIN,
            "worst prompt": "{worst:.2f}",
        },
    ),
}


def without_tiles(name: str) -> Figure:
    """Return a figure's compiled passes on processors without AMX, whose products have other prices."""
    figure = FIGURES[name]
    labels = "135M, bfloat16", "135M, Q4_1", "1.5B, Q4_K_M"
    runs = {label: figure.runs[label] for label in labels}
    ours = {}
    for label, run in runs.items():
        ours[label] = run._replace(options=run.options.replace(THREE, "--methods auto plain"))
        if "Q4" in label and name == "speed":
            ours[label] = run._replace(options=ours[label].options.replace("plain", "plain --activations int8"))
        elif "Q4" in label:
            ours[f"{label}, activations in 8 bits"] = run._replace(options=f"{run.options} --activations int8")
    return figure._replace(runs=ours, plot=None, lacks="AMX")


FIGURES |= {f"{name}-without-tiles": without_tiles(name) for name in ("speed", "passes")}
FIGURES["passes-larger"] = FIGURES["passes"]._replace(
    runs={
        f"{size}, random Q4_K": Run("passes.py", f"--rounds 5 --target MODELS/{size}-random.gguf --json", "--rounds 2")
        for size in ("3B", "8B")
    },
    plot=None,
    alt="",
)


def lacking(options: str) -> list[str]:
    """Return what a run needs and the machine has not."""
    found = [name for place, name in PLACES.items() if re.search(rf"\b{place}\b", options) and name not in os.environ]
    files = re.findall(r"\bMODELS/[^\s\"]+", options) if not found else []
    return found + [name for name in files if not Path(filled(name)).exists()]


def filled(text: str) -> str:
    """Return text with what the environment says in place of its words."""
    return re.sub(rf"\b({'|'.join(PLACES)})\b", lambda found: os.environ[PLACES[found[0]]], text)


def measured(run: Run, fast: bool) -> list[Row]:
    """Run a command; return its rows."""
    words = [filled(word) for word in shlex.split(run.command(fast))[1:]]
    words = [str(path) for word in words for path in (sorted(ROOT.glob(word)) if "*" in word else [word])]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def facts() -> Row:
    """Return what figures depend on besides their command."""
    from specinfer.common.versions import versions

    commit = git("describe", "--always", "--exclude=*")
    commit += "-dirty" if git("diff", "HEAD", "--", ".", ":!docs") else ""  # pages change as figures are measured
    return {"machine": machine(), "versions": versions(), "commit": commit, "date": date.today().isoformat()}


def git(*words: str) -> str:
    """Return what git says of this repository."""
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def machine() -> Row:
    """Return the processor, what it can do, its cores and the memory in GB."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)", text, re.M)
    flags = set(re.findall(r"\b\w+\b", "".join(re.findall(r"^flags\s*: (.*)", text, re.M)[:1])))
    return {
        "cpu": re.sub(r"\((R|TM)\)| Processor| CPU|@.*", "", name[1]).strip() if name else platform.machine(),
        "features": [feature for flag, feature in FEATURES.items() if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
    }


def kept(name: str) -> list[Row]:
    """Return the runs of a figure's file."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []


def measure(name: str, fast: bool, here: Row) -> int:
    """Run what a figure needs and the machine has, and keep it with its circumstances; return how many runs failed."""
    failed, feature = 0, FIGURES[name].lacks
    if feature in here["machine"]["features"]:
        print(f"{name}: left as it was, for this processor has {feature}", flush=True)
        return 0
    for label, run in FIGURES[name].runs.items():
        title = f"{name}: {label or run.script}"
        if missing := lacking(run.options):
            print(f"{title}: left as it was, for there is no {', '.join(missing)}", flush=True)
            continue
        started = perf_counter()
        try:
            rows = measured(run, fast)
        except subprocess.CalledProcessError as error:
            print(f"{title}: left as it was, for its command failed with status {error.returncode}", flush=True)
            failed += 1
            continue
        print(f"{title}: {perf_counter() - started:.0f} s", flush=True)
        found = {one["run"]: one for one in kept(name)}
        found[label] = {"run": label, "command": run.command(fast), **here, "rows": rows}
        runs = [found[one] for one in FIGURES[name].runs if one in found]
        (FOLDER / f"{name}.json").write_text(json.dumps(runs, indent=1) + "\n")
    return failed


def cell(form: str, row: Row) -> str:
    """Return a row in a format; nothing if it lacks what the format names."""
    try:
        return form.format(**row)
    except KeyError:
        return ""


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown, without columns that are empty."""
    filled = [place for place in range(len(headings)) if any(line[place] for line in lines)]
    rows = [headings, ["---"] * len(headings), *lines]
    return ["| " + " | ".join(row[place] for place in filled) + " |" for row in rows] if lines else []


def rows_of(name: str) -> list[Row]:
    """Return the rows of all of a figure's runs, each with its run's label."""
    return [{"run": run["run"], **row} for run in kept(name) for row in run["rows"]]


def first_cell(figure: Figure, row: Row, form: str) -> str:
    """Return a row's first cell: the name of its value, if that has one, which may be a format."""
    value = cell(form, row)
    found = figure.names.get(value, figure.names.get(value.partition(" ")[0], value))
    return found.format(**row)


def listed(figure: Figure, rows: list[Row]) -> list[str]:
    """Return a table with a line for each row that has a first cell."""
    first, *others = figure.columns.values() or [""]
    lines = [
        [row["run"] if len(figure.runs) > 1 else "", begun, *(cell(form, row) for form in others)]
        for row in rows
        if (begun := first_cell(figure, row, first))
    ]
    return table(["", *figure.columns], lines)


def spread(rows: list[Row], side: str, shown: str, top: str) -> list[str]:
    """Return a table of cells, with formats for the first cell of a line, for a cell, and for the head of a column."""
    cells = {(cell(side, row), cell(top, row)): cell(shown, row) for row in rows}
    sides, tops = dict.fromkeys(line for line, _ in cells), dict.fromkeys(head for _, head in cells)
    return table(["", *tops], [[line, *(cells.get((line, head), "") for head in tops)] for line in sides])


def written(name: str) -> str:
    """Return what stands in a figure's block: table, plot, sentences, and each run's command and machine."""
    figure, rows = FIGURES[name], rows_of(name)
    parts = [
        "\n".join(spread(rows, *figure.columns.values(), figure.across) if figure.across else listed(figure, rows))
    ]
    if figure.plot and rows:
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="figures/{name}-dark.svg">'
        parts.append(f'<picture>{dark}<img src="figures/{name}-light.svg" alt="{figure.alt}"></picture>')
    parts += [cell(note, row) for row in rows for note in figure.notes]
    done = {run["run"]: source(run) for run in kept(name)}
    waiting = {label: f"not measured yet: `{run.command(False)}`" for label, run in figure.runs.items()}
    parts.append("\n".join(f"- {label}: {text}" if label else f"- {text}" for label, text in (waiting | done).items()))
    return "\n\n".join(filter(None, parts)) + "\n"


def source(run: Row) -> str:
    """Return where a run's figures are from."""
    there, versions = run["machine"], [f"{name} {version}" for name, version in run["versions"].items()]
    where = ["{cores} cores, {cpu} with {features[0]}".format(**there)] if there else []
    memory = [f"{there['memory']} GB"] if "memory" in there else []
    return f"`{run['command']}`: {', '.join([*where, *memory, *versions, 'commit ' + run['commit'], run['date']])}"


def summary() -> str:
    """Return tokens a second by method and target, and how much faster `auto` is, for the README."""
    rows = [{**row, "name": METHODS[kind(row)], "gain": cell(" ({ratio:.2f})", row)} for row in rows_of("speed")]
    return "\n".join(spread(rows, "{name}", "{tokens/s:.1f}{gain}", "{run}")) + "\n"


def block(name: str) -> str:
    """Return what stands in a block of a page."""
    return summary() if name == "speed-summary" else written(name)


def page(text: str) -> str:
    """Return a page with its blocks as the files say."""
    return BLOCK.sub(lambda found: f"{found[1]}{found[2]}{block(found[1])}", text)


def draw(name: str) -> None:
    """Write a figure's plots, on light and on dark paper."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    from specinfer.viz.plots.axes import axes_of, open_frame
    from specinfer.viz.style import DARK, LIGHT, ON_DARK

    figure, mpl.rcParams["svg.hashsalt"] = FIGURES[name], "specinfer"  # the same element names every time
    dark = DARK | {f"by{number}": colour for number, colour in enumerate(ON_DARK)}
    for paper, palette in ("light", LIGHT), ("dark", dark):
        ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        with mpl.rc_context({**dict.fromkeys(ink, palette["ink"]), "figure.facecolor": palette["paper"]}):
            ax = axes_of(None, 7.5, 3.6)
            ax.set_facecolor(palette["paper"])
            open_frame(ax)
            ax.grid(axis="y", color=palette["pale"])
            assert figure.plot is not None
            figure.plot(ax, rows_of(name), palette)
            ax.legend(facecolor=palette["paper"], framealpha=1, edgecolor="none", fontsize=8)
            ax.figure.savefig(FOLDER / f"{name}-{paper}.svg", metadata={"Date": None})
            plt.close(ax.figure)


def main() -> None:
    """Measure, then write pages and plots."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of figures; default all: {', '.join(FIGURES)}")
    p.add_argument("--fast", action="store_true", help=f"few prompts and rounds; not {', '.join(SLOW)}")
    p.add_argument("--pages", action="store_true", help="write pages and plots from the files; run nothing")
    args = p.parse_args()
    names, failed = args.names or [name for name in FIGURES if not (args.fast and name in SLOW)], 0
    if unknown := {*names} - {*FIGURES}:
        p.error(f"no figures: {', '.join(sorted(unknown))}")
    here = facts()  # before any file changes, which would make the commit another one
    for name in names:
        failed += 0 if args.pages else measure(name, args.fast, here)
        if FIGURES[name].plot and kept(name):
            draw(name)
    for path in PAGES:
        path.write_text(page(path.read_text()))
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
