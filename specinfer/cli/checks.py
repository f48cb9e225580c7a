"""``specinfer check-model``, ``compile`` and ``certify``: what comes before any text.

Knows: the options.  Does not know: how models are checked or compiled, how distributions are enumerated.
"""

import sys
from typing import Annotated

import typer

from specinfer.cli import options
from specinfer.cli.terminal import bar, quieten, show
from specinfer.errors import NotCompiled


def check_model(
    model: Annotated[str, typer.Argument(help="Hub name or folder.")],
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Say whether a model scores token trees exactly: exact, chain only or unsupported, and why."""
    from specinfer.attention import check_model
    from specinfer.loading import load

    quieten()
    show([check_model(load(model, dtype, device).model)._asdict()], as_json)


def compile_passes(
    target: options.Target = None,
    draft: options.Drafts = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    listed: Annotated[bool, typer.Option("--list", help="Show what is compiled, and make nothing.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove everything compiled, and make nothing.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compile the passes of a target and its drafts for this machine: minutes, once. Needs a C++ compiler."""
    from specinfer.attention.packages import packages, packages_folder, remove_packages

    if remove:
        print(f"{remove_packages()} packages removed from {packages_folder()}", file=sys.stderr)
    elif not listed:
        decoder = options.load_decoder(target, draft, dtype=dtype, device=device, compile=True)
        print(decoder.passes, file=sys.stderr)
        if reasons := [reason for reason in decoder.plain if reason]:
            raise NotCompiled(f"{reasons[0]}; generation works, with plain passes")
    show(packages() or [{"package": f"none in {packages_folder()}"}], as_json)


def certify(as_json: options.Json = False) -> None:
    """Enumerate the exact output distribution of every verifier and tree policy, and of broken ones that must fail."""
    from specinfer.evaluation.certification import certify

    certificates = certify(progress=lambda pairs: bar("pair", pairs))
    show([certificate.to_dict() for certificate in certificates], as_json)
    if not all(certificate.passed for certificate in certificates):
        raise typer.Exit(1)
