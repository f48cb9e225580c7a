"""``specinfer check-model`` and ``specinfer certify``: is it exact?

Knows: which checks there are.  Does not know: how they are made.
"""

from typing import Annotated

import typer

from specinfer.cli import options
from specinfer.cli.terminal import bar, quieten, show


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


def certify(as_json: options.Json = False) -> None:
    """Enumerate the exact output distribution of every verifier and tree policy, and of broken ones that must fail."""
    from specinfer.evaluation.certification import certify

    certificates = certify(progress=lambda pairs: bar("pair", pairs))
    show([certificate.to_dict() for certificate in certificates], as_json)
    if not all(certificate.passed for certificate in certificates):
        raise typer.Exit(1)
