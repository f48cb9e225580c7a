"""The topology-aware mask, in the form that each attention implementation takes.

Knows: layouts, committed lengths, window sizes, the mask conventions of transformers.
Does not know: caches, weights, what tokens mean.

    sdpa, eager       additive float (R, 1, T, L): 0 = attend.  With a bool mask eager is silently wrong (it adds 0/1),
                      and sdpa converts the mask again in every layer
    flex_attention    BlockMask
    flash_attention_* takes no tree mask: refused by name
    several layer types (gemma2, gemma3, gpt-oss ...): a dict, one mask per type

transformers passes a 4-D mask through unchanged, so a sliding window must be in it.  The window is measured between
tree *positions* (committed length + depth), not between cache columns.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from specinfer.attention.layout import Layout
from specinfer.common.tensors import on_device
from specinfer.errors import UnsupportedModel

IMPLEMENTATIONS = ("sdpa", "eager", "flex_attention")


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


def attention_mask(
    spec: AttentionSpec,
    layout: Layout,
    lengths: Sequence[int],
    dtype: torch.dtype,
    kv_length: int | None = None,
    arrange: Callable[[Tensor], Tensor] = lambda values: values[None],
) -> Any:
    """Build the mask of one pass over the committed prefix and the pending columns.

    Args:
        spec: the model's attention.
        layout: the pass's nodes; S pending columns.
        lengths: committed slots of each of the B rows.
        dtype: the model's floating type, for additive masks.
        kv_length: L, the columns of the pass.  None = those up to the S pending columns of the longest row; any columns
            beyond are free, and hidden.
        arrange: from values of nodes (N, ...) to the (R, T, ...) of the forward; one row of all nodes by default.

    Returns:
        What the model's ``attention_mask`` argument takes: one mask (R, 1, T, L), or a dict of masks by layer type.
    """
    kv_length = kv_length or max(lengths) + layout.visible.shape[1]
    masks = {
        name: _converted(spec.implementation, arrange(_visible(layout, lengths, window, kv_length)), dtype)
        for name, window in spec.windows.items()
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _visible(layout: Layout, prefix: Sequence[int], window: int | None, kv_length: int) -> Tensor:
    """Return (N, L) bool: which of the L columns of its row each node attends to."""
    pending, device = layout.visible.shape[1], layout.visible.device
    if window is None and len(set(prefix)) == 1:  # above all, a single row
        visible = pad(layout.visible[:, : kv_length - prefix[0]], (prefix[0], 0), value=True)
        return pad(visible, (0, kv_length - visible.shape[1])) if kv_length > visible.shape[1] else visible
    lengths = on_device(prefix, device)[layout.rows, None]  # (N, 1)
    columns = torch.arange(kv_length, device=device)
    relative = columns - lengths  # (N, L): < 0 committed, 0 <= .. < S pending, beyond: free
    index = relative.clamp(0, pending - 1)
    visible = torch.where(relative < 0, True, layout.visible.gather(1, index) & (relative < pending))
    if window is None:
        return visible
    depths = layout.depths[layout.rows].gather(1, index)
    keys = torch.where(relative < 0, columns, lengths + depths)  # positions
    queries = lengths + layout.node_depths[:, None]
    return visible & (queries - keys < window)


def _converted(implementation: str, visible: Tensor, dtype: torch.dtype) -> Any:
    if implementation != "flex_attention":
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
    from torch.nn.attention.flex_attention import create_block_mask

    batch, queries, keys = visible.shape
    return create_block_mask(
        lambda b, _head, q, k: visible[b, q, k], batch, None, queries, keys, device=str(visible.device)
    )
