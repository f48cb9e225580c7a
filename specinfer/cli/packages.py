"""``specinfer compile``: passes compiled once, kept in the cache folder, used from then on."""

import sys
from typing import Annotated

import typer

from specinfer.cli.options import DeviceOption, DraftOption, DtypeOption, JsonOption, TargetOption
from specinfer.cli.terminal import quieten, show
from specinfer.errors import NotCompiled


def compile_passes(
    target: TargetOption = None,
    draft: DraftOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    listed: Annotated[bool, typer.Option("--list", help="Show what is compiled, and make nothing.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove everything compiled, and make nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile the passes of a target and its drafts for this machine: minutes, once. Needs a C++ compiler."""
    from specinfer.attention.packages import packages, packages_folder, remove_packages
    from specinfer.decoder import SpeculativeDecoder

    quieten()
    if remove:
        print(f"{remove_packages()} packages removed from {packages_folder()}", file=sys.stderr)
    elif not listed:
        decoder = SpeculativeDecoder.from_pretrained(target, draft or "auto", dtype=dtype, device=device, compile=True)
        print(decoder.passes, file=sys.stderr)
        if reasons := [reason for reason in decoder.plain if reason]:
            raise NotCompiled(f"{reasons[0]}; generation works, with plain passes")
    show(packages() or [{"package": f"none in {packages_folder()}"}], as_json)
