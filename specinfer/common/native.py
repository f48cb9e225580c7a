"""Functions in C++: compiled once on each machine, for its processor, without torch's headers.

Knows: compilers, where libraries are kept.  Does not know: what their functions compute.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

from specinfer.common.files import cache_folder

OPTIONS = (
    *("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-fopenmp", "-shared", "-fPIC"),
    "-fvisibility-inlines-hidden",  # else libraries that are loaded later take these functions for their own
)


def library(source: Path, *included: Path) -> ctypes.CDLL | None:
    """Return a compiled library, made if this machine has none yet; None without a compiler.

    Compiled passes find its functions in the process.

    Args:
        source: its code.
        *included: other files that this includes.
    """
    if (program := compiler()) is None:
        return None
    version = subprocess.run([program, "--version"], capture_output=True, check=False).stdout
    machine = repr(sorted(torch.cpu.get_capabilities().items())).encode()
    sources = [path.read_bytes() for path in (source, *included)]
    key = hashlib.sha256(b"\0".join([*sources, " ".join(OPTIONS).encode(), version, machine])).hexdigest()
    path = cache_folder() / source.stem / f"{key[:16]}.so"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                _compile(program, source, path)
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.CalledProcessError):
        return None


def compiler() -> str | None:
    """Return this machine's C++ compiler."""
    names = filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))
    return next(filter(None, map(shutil.which, names)), None)


def _compile(program: str, source: Path, path: Path) -> None:
    """Write the library: complete, or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        subprocess.run([program, *OPTIONS, str(source), "-o", str(made)], check=True, capture_output=True)
        made.rename(path)
