"""The versions that texts and figures may depend on."""

from functools import cache
from importlib.metadata import version

PACKAGES = ("specinfer", "torch", "transformers")


def versions() -> dict[str, str]:
    """Return them by package."""
    return {package: _version(package) for package in PACKAGES}


_version = cache(version)
