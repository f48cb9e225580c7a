"""compressed-tensors: integers of 4 or 8 bits in words or bytes, or floating point numbers of 8 bits, layer by layer.

Knows: groups of layers, and how each stores its matrices.  Does not know: files, models, the packed layout.

States keep their numbers, whatever a checkpoint says of rounding them.
"""

from collections.abc import Mapping

from torch import Tensor

from specinfer.attention.packed.schemes.base import (
    FLOATS,
    WIDTHS,
    WORD,
    Expected,
    Layer,
    Matrix,
    Scheme,
    Settings,
    fields,
    group_of,
    names,
    order_of,
)
from specinfer.attention.packed.schemes.floats import ScaledLayer
from specinfer.errors import ModelError

FORMATS = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
UNUSED = "quant_method", "quantization_status", "global_compression_ratio", "kv_cache_scheme", "version"
UNUSED_OF_GROUPS = "weights", "input_activations", "output_activations"  # weights are read for themselves
UNUSED_OF_WEIGHTS = "dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype", "actorder"
# what states, keys and values would be rounded with
UNUSED_TENSORS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale")


class IntegerLayer(Layer):
    """A matrix (N, K): words (N, K x bits / 32) if it is packed, else a byte for each integer.

    Args:
        bits: of an integer.
        group: inputs that share a scale; -1 for all of them, and 0 for all of all outputs.
        symmetric: whether it has no zero points.
        words: whether integers are in words.
        ordered: whether inputs say their groups.
    """

    def __init__(self, bits: int, group: int, symmetric: bool, words: bool, ordered: bool) -> None:
        self.bits, self.group, self.symmetric, self.words, self.ordered = bits, group, symmetric, words, ordered

    def tensors(self, outputs: int, inputs: int) -> dict[str, Expected]:
        """See `Layer`."""
        groups, shared = inputs // group_of(self.group or -1, inputs), WORD // self.bits
        found = {"weight": Expected(("I8",), (outputs, inputs))}
        if self.words:
            found = {
                "weight_packed": Expected(("I32",), (outputs, inputs // shared)),
                "weight_shape": Expected(("I64", "I32"), (2,), optional=True),
            }
        shape = (outputs, groups) if self.group else (1, 1)
        words = (-(-outputs // shared), groups)
        zeros = Expected(("I32",), words, self.symmetric) if self.words else Expected(("I8",), shape, self.symmetric)
        return found | {
            "weight_scale": Expected(FLOATS, shape),
            "weight_zero_point": zeros,
            "weight_g_idx": Expected(("I32",), (inputs,), optional=not self.ordered),
        }

    def read(self, found: Mapping[str, Tensor], outputs: int, inputs: int) -> Matrix:
        """See `Layer`."""
        if "weight_shape" in found and found["weight_shape"].tolist() != [outputs, inputs]:
            raise ModelError(f"its weight_shape is not {outputs}, {inputs}: get it again")
        group, middle = group_of(self.group or -1, inputs), 1 << (self.bits - 1)
        order = order_of(found.get("weight_g_idx"), inputs, group)

        def integers(rows: slice) -> Tensor:
            return fields(found["weight_packed"][rows], self.bits) if self.words else self._from(found["weight"][rows])

        zeros = found.get("weight_zero_point")
        if zeros is not None:
            zeros = fields(zeros.T, self.bits).T[:outputs].short() if self.words else zeros.short() + middle
            zeros = zeros.expand(outputs, -1)
        return Matrix(self.bits, group, integers, found["weight_scale"].expand(outputs, -1), zeros, order)

    def _from(self, octets: Tensor) -> Tensor:
        """Return integers from 0 for those with a sign."""
        found = octets.short() + (1 << (self.bits - 1))
        if (found >> self.bits).any():
            raise ModelError(f"an integer has more than {self.bits} bits: the file is damaged, get it again")
        return found.byte()


def compressed_tensors(given: Settings) -> Scheme:
    """Return what a configuration says.

    Raises:
        ModelError: states are rotated, or matrices are sparse.
    """
    given.forget(UNUSED)
    form = given.choose("format", [*FORMATS, "mixed-precision"])
    if given.get("transform_config", dict, {}).get("config_groups"):
        raise ModelError("its transform_config rotates states, which is not read: take another checkpoint")
    if (sparse := given.get("sparsity_config", dict, {}).get("format", "dense")) != "dense":
        raise ModelError(f"its sparsity_config says {sparse!r:.40}, and dense alone is read: take another checkpoint")
    layers = [_group(group, form) for group in given.get("config_groups", dict).values()]
    ignored = given.get("ignore", list, [])

    def layer(name: str) -> Layer | None:
        """Return the layer of the first group that names it, else of one that names all linear layers."""
        if names(name, ignored):
            return None
        exact = [layer for targets, layer in layers if names(name, targets)]
        return next(iter([*exact, *(layer for targets, layer in layers if "Linear" in targets)]), None)

    packs = any(isinstance(layer, IntegerLayer) for _, layer in layers)
    return Scheme(layer, packs, frozenset(UNUSED_TENSORS))


def _group(values: object, form: str) -> tuple[list[object], Layer]:
    """Return the modules that a group of layers names, and how they are stored."""
    if not isinstance(values, dict) or not isinstance(weights := values.get("weights"), dict):
        raise ModelError("a group of its quantization_config does not say how weights are stored: get it again")
    group, of_weights = Settings(values), Settings(weights)
    group.forget(UNUSED_OF_GROUPS)
    of_weights.forget(UNUSED_OF_WEIGHTS)
    targets = group.get("targets", list)
    form = group.choose("format", FORMATS, form)
    kind, symmetric = of_weights.choose("type", ["int", "float"], "int"), of_weights.get("symmetric", bool, True)
    strategy = of_weights.choose("strategy", ["group", "channel", "tensor", *["block"] * (kind == "float")])
    size, block = of_weights.get("group_size", int, -1), of_weights.get("block_structure", list, [0, 0])
    if kind == "float":
        of_weights.choose("num_bits", [8])
        shapes = {"group": (1, size), "channel": (1, 0), "tensor": (0, 0), "block": tuple(block)}
        layer: Layer = ScaledLayer(shapes[strategy], "weight_scale")
    else:
        per_scale = {"group": size, "channel": -1, "tensor": 0}[strategy]
        bits, ordered = of_weights.choose("num_bits", WIDTHS), weights.get("actorder") in ("group", True)
        layer = IntegerLayer(bits, per_scale, symmetric, form == FORMATS[0], ordered)
    group.check_all_used()
    of_weights.check_all_used()
    return targets, layer
