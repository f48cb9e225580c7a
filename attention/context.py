"""What a model's configuration says: how many positions it has, and to what its layers attend.

Knows: transformers' names for sizes of contexts, rotary embeddings and types of layers.  Does not know: passes, masks.
Rotary embeddings extend a context, or change with it:

    default                as many as max_position_embeddings says
    linear, yarn, llama3   factor times the original context, where max_position_embeddings was left at that: so model
                           cards say to switch an extension on, and transformers says for linear scaling
    dynamic, longrope      all frequencies change as soon as *any* position of a pass exceeds the original context.  A
                           tree exceeds it before its accepted path does, so trees are exact up to it only
"""

from collections.abc import Iterator, Mapping
from operator import itemgetter
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
        """Read a text configuration of transformers."""
        name, size = next(((name, size) for name in SIZES if (size := getattr(config, name, None))), ("", None))
        parts = [*_parts(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})]
        changing = [
            (part.get(ORIGINAL) or getattr(config, ORIGINAL, None) or size, part)
            for part in parts
            if _type(part) in CHANGING
        ]
        by_size = itemgetter(0)
        exact, changer = min(((limit, part) for limit, part in changing if limit), key=by_size, default=(None, {}))
        if size is None:
            return cls(None, exact, f"rope_type={_type(changer)}" if exact else "")
        extended, extender = min(((_extended(part, size), part) for part in parts), key=by_size, default=(size, {}))
        if exact is not None:
            setting = f"{ORIGINAL}, beyond which {_type(changer)} rotary embeddings change with the longest row"
        elif extended > size:
            setting = f"{name}={size}, extended by rope_type={_type(extender)} with factor={extender['factor']:g}"
        else:
            setting = name
        return cls(extended, exact, setting)


class AttentionSpec(NamedTuple):
    """The attention of a model's layers."""

    implementation: str  # one of IMPLEMENTATIONS
    windows: dict[str, int | None]  # layer type -> sliding window in tokens, None = full attention
    others: tuple[tuple[int, str], ...] = ()  # layers of other types, which take no tree mask, and their types

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
        named = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
        types = [*(named or default)]
        known: dict[str, int | None] = {"full_attention": None, "global": None}
        if window is not None:
            known["sliding_attention"] = window
        windows = {name: known[name] for name in types if name in known}
        others = [(layer, name) for layer, name in enumerate(types) if name not in known]
        return cls(implementation, windows, tuple(others))


def _parts(rope: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of each kind of layer: one for all, or one each."""
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    yield from nested or [rope]


def _type(part: Mapping[str, object]) -> str:
    return str(part.get("rope_type") or part.get("type") or "default")


def _extended(part: Mapping[str, Any], size: int) -> int:
    """Return how many positions rotary embeddings are made for."""
    factor = part.get("factor")
    if _type(part) not in EXTENDING or not isinstance(factor, int | float):
        return size
    return max(size, int(factor * (part.get(ORIGINAL) or size)))
