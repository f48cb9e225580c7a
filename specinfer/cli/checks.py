"""``specinfer check-model`` and ``specinfer certify``: is it exact?"""

import sys
from typing import Annotated

import typer

from specinfer.cli.options import DeviceOption, DtypeOption, JsonOption
from specinfer.cli.terminal import quieten, show


def check_model(
    model: Annotated[str, typer.Argument(help="Hub name or folder.")],
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Say whether a model scores token trees exactly: exact, chain only or unsupported, and why."""
    from specinfer.attention import check_model
    from specinfer.loading import load

    quieten()
    rows = [check_model(load(model, dtype, device).model)._asdict()]
    show(rows, as_json)


def certify(as_json: JsonOption = False) -> None:
    """Enumerate the exact output distribution of every verifier and tree policy, and of broken ones that must fail."""
    from tqdm import tqdm

    from specinfer.evaluation.certification import certify

    certificates = certify(progress=lambda pairs: tqdm(pairs, unit="pair", disable=not sys.stderr.isatty()))
    show([certificate.to_dict() for certificate in certificates], as_json)
    if not all(certificate.passed for certificate in certificates):
        raise typer.Exit(1)
