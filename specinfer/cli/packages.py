"""``specinfer compile``: passes are compiled once, kept in the cache folder and used from then on.

Knows: the options.  Does not know: how passes are compiled (`attention.packages`).
"""

import sys
from typing import Annotated

import typer

from specinfer.cli import options
from specinfer.cli.terminal import show
from specinfer.errors import NotCompiled


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
