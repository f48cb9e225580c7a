"""The versions that texts and figures may depend on.

Knows: this package's version, whether it is installed or run from a checkout.  Does not know: what is written with it.
"""

from functools import cache

VERSION = "0.1.0"  # as in pyproject.toml
OTHERS = ("torch", "transformers")


def versions(*more: str) -> dict[str, str]:
    """Return them by package, and those of further packages."""
    return {"specinfer": VERSION, **{package: _installed(package) for package in (*OTHERS, *more)}}


@cache
def _installed(package: str) -> str:
    from importlib.metadata import version  # as slow to import as all that `import specinfer` needs

    return version(package)
