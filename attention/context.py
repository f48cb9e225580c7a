"""What a model's configuration says: how many positions it has, and to what its layers attend.

Knows: transformers' names for sizes of contexts, rotary embeddings and types of layers.  Does not know: passes, masks.
Rotary embeddings extend a context, or change with it:

    default                as many as max_position_embeddings says
    linear, yarn, llama3   factor times the original context, where max_position_embeddings was left at that: so model
                           cards say to switch an extension on, and transformers says for linear scaling
    dynamic, longrope      all frequencies change as soon as *any* position of a pass exceeds the original context.  A
                           tree exceeds it before its accepted path does, so trees are exact up to it only
"""

from collections.abc import Mapping
from math import inf, isfinite
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from specinfer.errors import UnsupportedModel

SIZES = ("max_position_embeddings", "max_seq_len")  # mpt: the latter
EXTENDING = ("linear", "dynamic", "yarn", "llama3")
CHANGING = ("dynamic", "longrope")
ORIGINAL = "original_max_position_embeddings"
IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")  # of attention, those that take a tree mask


class Context(NamedTuple):
    """The positions of a model.

    Attributes:
        positions: how many there are; None if unbounded.
        exact: how many are exact under trees, if less than these; else None.
        setting: what in the configuration decides about the limit of trees, in words.
    """

    positions: int | None
    exact: int | None
    setting: str

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Context":
        """Read a text configuration of transformers.

        Raises:
            UnsupportedModel: an original context that is no size.
        """
        name, size = next(((name, size) for name in SIZES if (size := getattr(config, name, None))), ("", None))
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]  # of each kind of layer, or all
        original = _original(getattr(config, ORIGINAL, None)) or size
        limits = {_original(part.get(ORIGINAL)) or original: _type(part) for part in parts if _type(part) in CHANGING}
        exact = min((limit for limit in limits if limit), default=None)
        if size is None:
            return cls(None, exact, f"rope_type={limits[exact]}" if exact else "")
        extended = {_extended(part, size): part for part in parts}
        positions = min(extended)
        if exact is not None:
            setting = f"{ORIGINAL}, beyond which {limits[exact]} rotary embeddings change with the longest row"
        elif positions > size:
            part = extended[positions]
            setting = f"{name}={size}, extended by rope_type={_type(part)} with factor={part['factor']:g}"
        else:
            setting = name
        return cls(positions, exact, setting)


class AttentionSpec(NamedTuple):
    """The attention of a model's layers."""

    implementation: str  # one of IMPLEMENTATIONS
    windows: dict[str, int | None]  # layer type -> sliding window in tokens, None = full attention
    others: tuple[tuple[int, str], ...] = ()  # layers of other types, which take no tree mask, and their types
    lists_layers: bool = False  # whether the configuration gives the types of layers

    @classmethod
    def of(cls, model: Any) -> "AttentionSpec":
        """Read the specification from a Hugging Face model's config.

        Raises:
            UnsupportedModel: flash attention.
        """
        config = model.config.get_text_config(decoder=True)
        implementation = config._attn_implementation or "eager"
        if implementation not in IMPLEMENTATIONS:
            raise UnsupportedModel(
                f"{type(model).__name__} uses attn_implementation={implementation!r}, which takes no tree mask: "
                f"load it with attn_implementation set to one of {', '.join(IMPLEMENTATIONS)}"
            )
        window = getattr(config, "sliding_window", None)
        default = ["full_attention"] if window is None else ["sliding_attention"]
        listed = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
        types = listed or default
        known: dict[str, int | None] = {"full_attention": None, "global": None}
        if window is not None:
            known["sliding_attention"] = window
        windows = {name: known[name] for name in types if name in known}
        others = [(layer, name) for layer, name in enumerate(types) if name not in known]
        return cls(implementation, windows, tuple(others), bool(listed))


def _type(part: Mapping[str, object]) -> str:
    return str(part.get("rope_type") or part.get("type") or "default")


def _extended(part: Mapping[str, Any], size: int) -> int:
    """Return how many positions rotary embeddings are made for."""
    factor = part.get("factor")
    if _type(part) not in EXTENDING or not isinstance(factor, int | float) or not isfinite(factor):
        return size
    return max(size, int(factor * (_original(part.get(ORIGINAL)) or size)))


def _original(given: Any) -> int | None:
    """Return an original context, or None if it is not given; transformers does not check it."""
    if given and not (isinstance(given, int | float) and 0 < given < inf):
        raise UnsupportedModel(f"{ORIGINAL} is {given!r:.40}, and must be a number above 0: correct its config.json")
    return given or None
