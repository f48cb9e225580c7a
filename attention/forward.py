"""What is known of an unmodified Hugging Face causal language model, and how it is called.

Knows: the signature of its forward, its context, attention, devices, and torch's autocast, which changes its precision.
Does not know: passes, caches, trees.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from specinfer.attention.context import AttentionSpec, Context
from specinfer.attention.offload import device_of, is_dispatched, its_turn, spans_devices
from specinfer.attention.torch_private import modules_of
from specinfer.common.ranks import Ranks
from specinfer.errors import ModelError, UnsupportedModel

Inputs = dict[str, Any]  # of the model's forward
Outputs = tuple[Tensor, ...]

# names of caches in forwards: transformers has the first since 5.24, before it the next two; rwkv has the last
CACHES = ("cache", "past_key_values", "cache_params", "state")
LISTED = 6  # numbers of layers in a message
# of attention on a GPU, but cuDNN's, which plans anew for every length: 50 ms to 1 s on an H200 (docs/gpu.md)
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def cache_name(forward: Callable[..., object]) -> str:
    """Return what a forward calls its cache; "" for one that takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in parameters), "")


def returned_cache(output: object) -> Any:
    """Return the cache in a model's output, which may call it otherwise than its forward does; None without one."""
    return next((cache for name in CACHES if (cache := getattr(output, name, None)) is not None), None)


def checked_model(model: object) -> Any:
    """Return a model; raise `ModelError` for anything else."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ModelError(f"{model!r:.60} is not a model: give a transformers causal LM, or use from_pretrained")
    return model


class Forward:
    """A causal language model, as its configuration and the signature of its forward describe it.

    Args:
        model: a ``transformers`` causal LM, already on its device, or loaded with a ``device_map``: see `offload`.  It
            is never modified.

    Raises:
        ModelError: not a model.
        UnsupportedModel: flash attention, an encoder-decoder, no cache, weights on several devices without hooks, or
            FSDP.

    Attributes:
        stateful: why it keeps states that chains only can use (`passes.stateful`), in words; else "".
        ranks: the processes that hold parts of it.
        modules: of the model, as of the last call of `running`.
    """

    def __init__(self, model: Any) -> None:
        self.model = checked_model(model)
        self.name = type(model).__name__
        config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = config.vocab_size
        self.context = Context.of(config)
        self.max_positions = self.context.positions
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = cache_name(model.forward)
        if getattr(model.config, "is_encoder_decoder", False) or not self.cache_name:
            raise UnsupportedModel(
                f"{self.name} offers no cache of its tokens: it is an encoder-decoder, or a wrapper that hides the "
                "cache.  So nothing can be taken back: use a decoder-only model, without a wrapper (peft's has "
                "get_base_model(), which keeps LoRA, torch.compile's has _orig_mod)"
            )
        self.dispatched = is_dispatched(model)  # its hooks move inputs and weights
        devices = ", ".join(sorted({str(parameter.device) for parameter in model.parameters()}))
        if ", " in devices and not self.dispatched:
            raise UnsupportedModel(
                f"{self.name} is spread over {devices}, and no hooks move what its layers read: load it on one device, "
                "or with transformers' device_map"
            )
        self.ranks = Ranks.of(model)
        self.spec = AttentionSpec.of(model)
        self.stateful = _why_stateful(self.spec, self.model)
        self.modules = modules_of(model)
        self.layers: int = config.num_hidden_layers
        # with keys of one shape, as far as is known
        shared = getattr(config, "num_kv_shared_layers", 0)
        self.uniform_layers = 1 if spans_devices(model) else self.layers // self.ranks.stages - shared
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters

    @property
    def checkpoint(self) -> str:
        """What its checkpoint is called: its name on the hub, or its folder's or file's; its class without either."""
        name = str(getattr(self.model.config, "_name_or_path", "")) or self.name
        return Path(name).name if Path(name).exists() else name

    @property
    def device(self) -> torch.device:
        """Where token ids must be."""
        return device_of(self.model)

    @property
    def embedded(self) -> int:
        """How many token ids it can read; a head with a small vocabulary reads more than it proposes."""
        return max(self.vocab_size, len(getattr(self.model.get_input_embeddings(), "weight", ())))

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating type."""
        return self.model.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """The floating type that passes compute in now, if autocast gives them another one."""
        return autocast_dtype(self.device, self.dtype)

    def position_limit(self) -> int | None:
        """Return how many positions are exact under trees, None if unbounded: see `context`."""
        return self.max_positions if self.context.exact is None else self.context.exact

    def call(self, inputs: Inputs, aux_layers: Sequence[int]) -> tuple[Any, ...]:
        """Call the model: its output, and the auxiliary hidden states (R, T, K, H) if there are aux_layers."""
        options = {"output_hidden_states": True} if aux_layers else {}
        kernels = sdpa_kernel(KERNELS) if inputs["input_ids"].device.type == "cuda" else nullcontext()
        with its_turn(self.model), kernels:
            output = self.model(**inputs, **options, use_cache=True, return_dict=True)
        if not aux_layers:
            return (output,)
        if getattr(output, "hidden_states", None) is None:
            advice = "which EAGLE-style heads and contrastive search read: use other drafts, and no penalty_alpha"
            raise UnsupportedModel(f"{self.name} hands out no hidden states, {advice}")
        return output, torch.stack([output.hidden_states[layer] for layer in aux_layers], 2)


def autocast_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    """Return the type that autocast computes in now, on a device, with weights of this type; None if it does not."""
    kind = device.type
    if dtype is torch.float64 or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None  # float64 is never cast
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a device computes in the types of weights."""
    is_on = autocast_dtype(device, torch.float32) is not None
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


def autocast_as_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what restores autocast of a device as it is now: a run's steps compute alike, whoever asks for them."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


def _why_stateful(spec: AttentionSpec, model: Any) -> str:
    """Return why a model can work on chains only, "" if tree masks reach all its layers."""
    if not spec.others and (spec.lists_layers or not getattr(model, "_is_stateful", False)):
        return ""
    layers, kinds = [str(layer) for layer, _ in spec.others], ", ".join(dict.fromkeys(kind for _, kind in spec.others))
    numbers = ", ".join(layers if len(layers) <= LISTED else [*layers[:LISTED], "..."])
    where = f"layer{'s' * (len(layers) > 1)} {numbers} ({kinds})" if layers else "its layers"
    return f"a token cannot have siblings in {where}: recurrent states, and masks of a model's own, take no tree mask"
