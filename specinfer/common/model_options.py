"""Options of loading a model: transformers' options that are passed on, and where layers go.

Knows: names and values of these options, which devices there are, whether a folder can be written.
Does not know: how models are found and loaded.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import TypeAlias

import torch

from specinfer.common.advice import did_you_mean, where_to_give
from specinfer.common.files import expanded
from specinfer.errors import ModelError

DeviceMap: TypeAlias = str | int | Mapping[str, str | int | torch.device] | torch.device | None
HUB = ("cache_dir", "revision", "subfolder", "token")  # which files are read, also of tokenizers
PASSED_ON: dict[str, type | UnionType] = {  # options of transformers, and their types
    "cache_dir": str | os.PathLike,
    "revision": str,
    "subfolder": str,
    "token": str | bool,
    "attn_implementation": str | dict,
    "offload_buffers": bool,
    "quantization_config": object,
    "variant": str,
}
ROUNDED = {"int4": 4, "int8": 8}  # words for what weights may be rounded to, and their bits
# Options that are decided here: the value that changes nothing, and why all others are refused.
DECIDED: dict[str, tuple[object, str]] = {
    "trust_remote_code": (False, "no code that comes with a model runs"),
    "use_safetensors": (True, "other files would be unpickled, and safetensors alone are read"),
    "torch_dtype": (None, "give dtype"),
    "low_cpu_mem_usage": (True, "weights are always loaded one by one"),
    "local_files_only": (None, "the local cache comes first, and HF_HUB_OFFLINE=1 keeps it at that"),
    "output_loading_info": (None, "missing and unexpected weights are refused"),
    "ignore_mismatched_sizes": (None, "weights of another shape are refused"),
}
# kinds of devices, and how many of each torch sees
DEVICES: dict[str, Callable[[], int]] = {
    "cpu": lambda: 1,
    "cuda": lambda: torch.cuda.device_count(),
    "xpu": lambda: torch.xpu.device_count(),
    "mps": lambda: int(torch.backends.mps.is_available()),
}
PLANS = ("auto", "balanced", "balanced_low_0", "sequential")  # words for device maps


def checked_options(given: Mapping[str, object], others: Iterable[str] = ()) -> dict[str, object]:
    """Return the options to pass on to transformers.

    Args:
        given: by name.
        others: names of further options of the same call, for advice.

    Raises:
        ModelError: an option that is unknown, decided here, or of another type.
    """
    for name in given:
        if name in DECIDED and given[name] != DECIDED[name][0]:
            raise ModelError(f"{name}={given[name]!r:.40} is not possible: {DECIDED[name][1]}")
        if name not in DECIDED and name not in PASSED_ON:
            raise ModelError(f"unknown option {name} of loading: {_advice(name, others)}")
    found = {name: given[name] for name in PASSED_ON if given.get(name) is not None}
    for name, value in found.items():
        if not isinstance(value, PASSED_ON[name]):
            wanted = str(getattr(PASSED_ON[name], "__name__", PASSED_ON[name])).replace("|", "or")
            raise ModelError(f"{name}={value!r:.40} is not possible: give {wanted}, as transformers takes it")
    return found


def _advice(name: str, others: Iterable[str]) -> str:
    """Return advice on the option that may have been meant."""
    from transformers import GenerationConfig

    passed = f"besides those of this function, transformers' {', '.join(PASSED_ON)} are passed on"
    return where_to_give(name, [*PASSED_ON, *others], {"`generate`": vars(GenerationConfig())}, passed)


def checked_placement(
    device_map: object, max_memory: object, offload_folder: str | os.PathLike[str] | None, device: object
) -> dict[str, object]:
    """Return transformers' options that say where layers go; none without a device map.

    Raises:
        ModelError: a value that is not possible on this machine, values that contradict each other, no accelerate, or
            a folder that cannot be written.
    """
    given = {"max_memory": max_memory, "offload_folder": offload_folder}
    if device_map is None:
        if named := [name for name, value in given.items() if value is not None]:
            raise ModelError(f'{named[0]} concerns layers that a device_map spreads: give device_map="auto" as well')
        return {}
    if str(device) != "auto":
        raise ModelError(f"device={str(device)!r} and a device_map both say where the model goes: leave one out")
    if importlib.util.find_spec("accelerate") is None:
        raise ModelError("device_map needs accelerate, which moves weights and inputs: `pip install accelerate`")
    return {
        "device_map": _map(device_map),
        "max_memory": None if max_memory is None else _sizes(max_memory),
        "offload_folder": None if offload_folder is None else _folder(offload_folder),
    }


def _map(device_map: object) -> object:
    if isinstance(device_map, str) and device_map in PLANS:
        return device_map
    if not isinstance(device_map, Mapping):
        _check_device(device_map, f"one of {', '.join(PLANS)}, a device, or a dict from modules to devices")
        return {"": device_map}
    for name, where in device_map.items():
        if not isinstance(name, str):
            raise ModelError(f"device_map has {name!r:.40}, which is not a module's name")
        _check_device(where, "cpu, disk, cuda:<n> or <n>")
    return dict(device_map)


def _check_device(where: object, choices: str) -> None:
    """Raise `ModelError` unless a layer can be there on this machine."""
    text = f"cuda:{where}" if isinstance(where, int) and not isinstance(where, bool) else str(where)
    kind, _, number = text.partition(":")
    if text == "disk":
        return
    if kind not in DEVICES or not (number or "0").isdecimal():
        raise ModelError(f"device_map has {where!r:.40}: {did_you_mean(text, [*PLANS, *DEVICES], f'give {choices}')}")
    if int(number or 0) >= (count := DEVICES[kind]()):
        raise ModelError(f"device_map has {where!r:.40}, and torch sees {count} of these devices: give {choices}")


def _sizes(max_memory: object) -> dict[int | str, int]:
    from accelerate.utils import convert_file_size_to_int

    form = 'a dict like {"cpu": "8GiB", 0: "20GiB"}'
    if not isinstance(max_memory, Mapping):
        raise ModelError(f"max_memory={max_memory!r:.60}: give {form}")
    for where, size in max_memory.items():
        is_gpu = isinstance(where, int) and not isinstance(where, bool) and 0 <= where < torch.cuda.device_count()
        if not is_gpu and where != "cpu":
            gpus = torch.cuda.device_count()
            raise ModelError(f"max_memory has {where!r:.40}, and this machine has cpu and {gpus} GPUs: give {form}")
        if isinstance(size, bool) or not isinstance(size, int | str):
            raise ModelError(f"max_memory has {size!r:.40} for {where}: give bytes, or a size like '8GiB'")
    try:
        return {where: convert_file_size_to_int(size) for where, size in max_memory.items()}
    except ValueError as error:
        raise ModelError(f"max_memory={dict(max_memory)!r:.60}: {error}") from None


def _folder(folder: str | os.PathLike[str]) -> str:
    """Return a folder's path; it is there then, and can be written."""
    try:
        path = expanded(folder)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return str(path)
    except (OSError, TypeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"offload_folder {str(folder)!r:.80} cannot be written ({reason}): give another one") from None
