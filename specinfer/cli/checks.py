"""``specinfer check-model``, ``check-draft``, ``compile`` and ``certify``: checks before any text.

Knows: the options.
Does not know: how models and drafts are checked, how models are compiled, how distributions are enumerated.
"""

import re
import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from specinfer.cli import options
from specinfer.cli.terminal import loading, print_json, show
from specinfer.common.files import write_whole
from specinfer.common.progress import Bars
from specinfer.common.tables import folded
from specinfer.errors import InputError, NotCompiled

if TYPE_CHECKING:
    from specinfer.engine.draft import Draft
    from specinfer.evaluation.certification import Certificate

PICTURES = ("png", "svg", "pdf")
DISTANCES = (
    "distance: total variation between what is emitted and the target's distribution, jointly over the first tokens; 0 "
    "but for rounding, or a known mistake that must be seen. Sizes of trees: nodes, levels, least probability, or "
    "children per level. with, without: replacement."
)
ERRORS = (
    "error: the largest difference between the package's logits (a head's states) and the plain model's, as a share "
    "of their spread; with packed weights, at 99 % of the nodes. limit: what rounding explains; a package beyond it is "
    "not kept. Heads may be rounded to fewer bits: they only propose, so no text changes."
)
PACKAGE = ("model", "is", "layers", "error", "limit", "MB")  # columns of the table of packages
UNKNOWN = " ?: made by a version that did not keep it."


def check_model(
    model: Annotated[str, Argument(help="Hub name, folder or GGUF file.")],
    *,
    layers: options.Layers,
    as_json: options.Json = False,
) -> None:
    """Say whether a model scores token trees exactly: exact, chain only or unsupported, and why."""
    options.check_paths(model)
    with loading(model):
        from specinfer.attention import check_model
        from specinfer.loading import load

        check = check_model(load(model, **layers.loading()).model)
    show([check._asdict()], as_json)


def check_draft(
    target: options.Target = None,
    draft: Annotated[
        list[str] | None,
        Option(help="A model, a trained head, suffix, recycling, ngram or bundled. Repeat.", show_default="bundled"),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        Option(help='JSON lines with "prompt", optionally "id" and "split". Repeat.', show_default="six short prompts"),
    ] = None,
    count: options.Count = 5,
    split: options.Split = "dev",
    max_new_tokens: options.NewTokens = 48,
    *,
    layers: options.Layers,
    quantize: options.Quantize = None,
    activations: options.Activations = None,
    plot: Annotated[Path | None, Option(help=f"File for a picture: .{', .'.join(PICTURES)}.", dir_okay=False)] = None,
    as_json: options.Json = False,
) -> None:
    """Say how well drafts fit a target, what trees of each size should gain here, and what may be wrong."""
    options.check_paths(target, *(draft or ()))
    with loading():
        from specinfer.evaluation.compare.prompts import read_prompt_file
        from specinfer.evaluation.doctor import PROMPTS
        from specinfer.evaluation.doctor import check_draft as run

    kind = _picture_kind(plot) if plot else None
    texts = [text for path in prompts or () for _, text in read_prompt_file(path, split, count)] or list(PROMPTS)
    drafts = [_unrefused(name, layers.dtype, layers.device, quantize) for name in draft or ["bundled"]]
    decoder = options.load_decoder(target, drafts, quantize=quantize, activations=activations, **layers.loading())
    report = run(decoder, texts, max_new_tokens=max_new_tokens, progress=Bars())
    if plot is not None:
        report.plot().figure.canvas.print_figure(drawn := BytesIO(), format=kind, dpi=150)
        write_whole(plot, drawn.getvalue())
    print_json(report.to_dict()) if as_json else print(report)


def _unrefused(name: str, dtype: str, device: str, quantize: str | None) -> "str | Draft":
    """Load a draft by name, a published head even if it does not fit its target; words stay words."""
    from specinfer.decoder import WORDS, load_draft
    from specinfer.drafts.published.formats import PublishedDraft

    if name in WORDS:
        return name
    draft = load_draft(name, dtype, device, quantize)
    if isinstance(draft, PublishedDraft):
        draft.least = 0.0
    return draft


def _picture_kind(path: Path) -> str:
    """Return the format that a file's name asks for; raise `InputError` for others, and where nothing can draw."""
    from specinfer.viz.plots.axes import part

    part("pyplot")
    if (kind := path.suffix.lower().removeprefix(".")) not in PICTURES:
        raise InputError(f"--plot {path} cannot be written as a picture: end its name in .{', .'.join(PICTURES)}")
    return kind


def compile_passes(
    *,
    models: options.Pair,
    quantize: options.Quantize = None,
    listed: Annotated[bool, Option("--list", help="Show what is compiled, and make nothing.")] = False,
    remove: Annotated[bool, Option("--remove", help="Remove everything compiled, and make nothing.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compile the passes of a target and its drafts for this machine: minutes, once. Needs a C++ compiler."""
    with loading():
        from specinfer.attention.compiler.packages import packages, packages_folder, remove_packages

    if remove:
        print(f"{remove_packages()} packages removed from {packages_folder()}", file=sys.stderr)
    elif not listed:
        decoder = models.decoder(quantize=quantize, compile=True)
        print(decoder.passes, file=sys.stderr)
        if reasons := [model.ways.reason for model in decoder.networks if model.ways.reason]:
            raise NotCompiled(f"{reasons[0]}; generation works, with plain passes")
    found = packages()
    if as_json or not found:
        show(found or [{"package": f"none in {packages_folder()}"}], as_json)
    else:
        rows = [{name: "?" if row[name] is None else row[name] for name in PACKAGE} for row in found]
        show(rows)
        unknown = any("?" in row.values() for row in rows)
        print(*folded([ERRORS + UNKNOWN * unknown]), sep="\n", file=sys.stderr)


def certify(as_json: options.Json = False) -> None:
    """Enumerate the exact output distribution of every verifier and tree policy, and of broken ones that must fail."""
    with loading():
        from specinfer.evaluation.certification import certify

    certificates = certify(progress=Bars())
    show([certificate.to_dict() if as_json else _certificate_row(certificate) for certificate in certificates], as_json)
    unexpected = [certificate for certificate in certificates if not certificate.passed]
    failures = f"{len(unexpected)} of {len(certificates)} pairs are not as expected: see the last column"
    words = failures if unexpected else f"all {len(certificates)} pairs are as expected"
    print(*([] if as_json else folded([DISTANCES])), words, sep="\n", file=sys.stderr)
    if unexpected:
        raise typer.Exit(1)


def _certificate_row(certificate: "Certificate") -> dict[str, object]:
    """Return a certificate's line of the table, its names without those of arguments."""
    tree, verifier = (
        re.sub(r"\w+=", "", words.replace("replacement=False", "without").replace("replacement=True", "with"))
        for words in (certificate.tree, certificate.verifier)
    )
    return {
        "tree": tree,
        "verifier": verifier,
        "drafts": certificate.drafts,
        "distance": certificate.total_variation,
        "expected": "0" if certificate.expected_lossless else "above 0",
        "as expected": certificate.passed,
    }
