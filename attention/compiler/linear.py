"""Products of a few states with weights packed once, as compiled passes multiply them on a CPU.

Knows: the forms that weights are packed in.  Does not know: models, graphs, how a compiled pass calls products.

`torch.nn.Linear` repacks its weight in every product.  Weights in these forms are packed once:

    packed    the weight in its own type, by MKL (float32) or oneDNN (16 bits)
    bf16      weights whose numbers are bfloat16 numbers, as most checkpoints have, by states in float32: products and
              sums are those of float32, and half its bytes are read (``kernels/linear.h``)
    bf16_states
              the same by states that are rounded to bfloat16 before every product, as a model in bfloat16 rounds
              them; sums, and all between the products, are float32.  Half as many instructions
    rounded   weights rounded to bfloat16, by states in float32
    dynamic_int8
              weights rounded to 8 bits with a scale for each output, states with a scale for each state; products and
              sums are those of integers

The last two forms change the results a little, so they are for heads, which only propose.  Language models do not
tolerate states of 8 bits: a few of their states are a thousand times as large as the rest, and set the scale.  Weights
of integers are packed by another layout: see `packed.layout`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from specinfer.attention.packed.products import is_x86
from specinfer.attention.torch_private import has_packed_products, pack_weight
from specinfer.common.memory import LargePages

ROUNDED_STATES = "bf16_states"  # of models; it is the graph that rounds, and its weights are packed as bf16
IN_FLOAT32 = ("bf16", ROUNDED_STATES, "rounded", "dynamic_int8")  # in these passes are float32, whatever the weights
FORMS = ("packed", *IN_FLOAT32)
BYTES = {"bf16": 2, "rounded": 2, "dynamic_int8": 1}  # of a packed number, if they are not its own
BLOCK = 32  # outputs of a block there
SAMPLED = 4  # rows of a weight that tell what its numbers are; packing looks at every one
SMALLEST = 1e-12  # a scale times 127, at least
LONGEST = 1 << 16  # inputs whose products of 8 bits have a sum of 32 bits
ROWS = {torch.float32: 64, torch.bfloat16: 16, torch.float16: 16}  # the number of states that packing is tuned for

_library = torch.library.Library("specinfer", "DEF")
# states (..., K), a weight (N, K) of which only the shape counts, the weight packed, bias (N,): returns (..., N)
_library.define("linear(Tensor states, Tensor like, Tensor packed, Tensor? bias) -> Tensor")
# states (..., K), a weight (N, K) packed, N or fewer, a form of ``kernels/linear.h``: returns (..., N), float32
_library.define("linear_blocks(Tensor states, Tensor packed, SymInt outputs, str form) -> Tensor")


@torch.library.register_fake("specinfer::linear", lib=_library)
def _shape(states: Tensor, like: Tensor, _packed: Tensor, _bias: Tensor | None) -> Tensor:
    return states.new_empty(*states.shape[:-1], len(like))


@torch.library.register_fake("specinfer::linear_blocks", lib=_library)
def _shape_blocks(states: Tensor, _packed: Tensor, outputs: int, _form: str) -> Tensor:
    return states.new_empty(*states.shape[:-1], outputs, dtype=torch.float32)


def forms(weights: Sequence[Tensor], rounded: bool) -> list[str]:
    """Return the forms that suit a model's matrices on this machine, fastest products first.

    Args:
        weights: of the model, (N, K) each.  Where they are bfloat16, ours are faster on x86 than torch's in bfloat16
            (measured on an AMD EPYC with AVX512-BF16 and on a Xeon with AMX), and more precise.
        rounded: whether they may be rounded.
    """
    whole = all(weight.dtype == torch.float32 for weight in weights) or is_x86()
    if rounded:
        return [
            *(["dynamic_int8"] if fits(weights[0], "dynamic_int8") else []),
            *(["rounded"] if whole and all(fits(weight, "rounded") for weight in weights) else []),
            "packed",
        ]
    pairs = [weight for weight in weights if weight.shape[1] % 2 == 0]  # the others are not packed
    samples = [weight[:: len(weight) // SAMPLED + 1] for weight in pairs]
    if not (whole and samples and all(form_of(sample, "bf16") for sample in samples)):
        return ["packed"]
    pair = all(weight.dtype == torch.bfloat16 for weight in weights) and _multiplies_pairs()
    return [*([ROUNDED_STATES] if pair else []), "bf16", "packed"]


def form_of(weight: Tensor, form: str) -> str:
    """Return the form that a weight is packed in if its model's is `form`; "" if it is not packed."""
    form = "bf16" if form == ROUNDED_STATES else form
    return form if fits(weight, form) and (form != "bf16" or _is_bfloat16(weight)) else ""


def fits(weight: Tensor, form: str) -> bool:
    """Whether this machine has products for a weight (N, K) in a form, as far as its type and shape tell."""
    if weight.device.type != "cpu" or weight.ndim != 2:
        return False
    if form == "packed":
        return has_packed_products(weight.dtype)
    size, of_kernel = weight.shape[1], weight.dtype in (torch.float32, torch.bfloat16)
    if form == "dynamic_int8":  # which is fast with AVX512-VNNI
        fast = torch.backends.cpu.get_cpu_capability().startswith("AVX512") and _has("avx512_vnni")
        return fast and of_kernel and size % 4 == 0 and size <= LONGEST
    return of_kernel and size % 2 == 0


@torch.inference_mode()
def pack(weights: Sequence[Tensor], form: str, pages: LargePages | None = None) -> Tensor:
    """Return weights (N_i, K) as one packed weight (sum of N_i, K), of `packed_shape` unless the form is "packed".

    Args:
        weights, form: of one product.
        pages: in which it lies; by default in pages of its own.

    Raises:
        ValueError: the form is "bf16", and a number is not a bfloat16 number.
    """
    pages = pages or LargePages()
    if form == "packed":
        joined = _joined([weight.detach() for weight in weights])
        return pages.copy(pack_weight(joined, ROWS[joined.dtype]))
    if form == "bf16" and not all(map(_is_bfloat16, weights)):
        raise ValueError("not all are bfloat16 numbers any more")
    if form == "dynamic_int8":
        lines = _rounded_lines(_joined([weight.detach().float() for weight in weights]))
    else:
        lines = _joined([weight.detach().bfloat16() for weight in weights])
    missing = -len(lines) % BLOCK
    blocks = (functional.pad(lines, (0, 0, 0, missing)) if missing else lines).unflatten(0, (-1, BLOCK))
    words = blocks if form == "dynamic_int8" else blocks.unflatten(2, (-1, 2))
    return pages.copy(words.transpose(1, 2))  # a weight of a gigabyte is copied once


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """Return weights (N_i, K) one after the other; a single one is not copied."""
    return torch.cat([*weights]) if len(weights) > 1 else weights[0]


def _rounded_lines(weight: Tensor) -> Tensor:
    """Return outputs of a weight (N, K) as words of 32 bits, (N, K / 4 + 2): rounded numbers, a scale, an offset."""
    scales = weight.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / 127
    numbers = (weight / scales).round_().to(torch.int8)
    offsets = 128 * numbers.sum(1, keepdim=True, dtype=torch.int32)
    return torch.cat([numbers.view(torch.int32), scales.view(torch.int32), offsets], 1)


def packed_shape(outputs: int, size: int, form: str) -> tuple[int, ...]:
    """Return the shape of a weight (N, K) in a form of the kernel, of words of 32 bits or of bfloat16 numbers."""
    blocks = -(-outputs // BLOCK)
    if form == "dynamic_int8":
        return blocks, size // 4 + 2, BLOCK
    return blocks, size // 2, BLOCK, 2


def _multiplies_pairs() -> bool:
    """Whether this processor multiplies pairs of bfloat16 numbers as fast as single float32 numbers."""
    return _has("avx512_bf16")


def _has(capability: str) -> bool:
    """Whether this processor has instructions, by torch's name for them."""
    return bool(torch.cpu.get_capabilities().get(capability))


def _is_bfloat16(weight: Tensor) -> bool:
    return torch.equal(weight.bfloat16().to(weight.dtype), weight)
