"""Counter-based random numbers: pure functions of (seed, stream, counters).

Their bits are equal on every device; the logarithms in Gumbel numbers may differ in the last digit.

Knows: how to turn a key and a counter into a uniform or Gumbel number.  Does not know: what the numbers decide.  There
is no state, so the order of calls, the batch and the tree change nothing.

The mixer is SplitMix64's finaliser (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014) over ``key + (counter + 1) * golden``, which is exactly the SplitMix64 sequence started at ``key``.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from specinfer.common.tensors import on_device

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = ((30, _MIX1), (27, _MIX2), (31, None))  # of the mixer: bits to shift, then a factor
_MASK = (1 << 64) - 1

CPU = torch.device("cpu")
AHEAD = 8  # positions whose noise is computed together
# streams: target choices, acceptance coins and residual draws, draft draws, training, draws of recorded distributions
COUPLING, COIN, DRAFT, TRAINING, RECORDING = 1, 2, 3, 4, 5


def key(seed: int, stream: int, *counters: int) -> int:
    """Derive an independent 64-bit key (as a signed integer, what torch stores) from a seed and counters."""
    state = _mix(seed & _MASK)
    for counter in (stream, *counters):
        state = _mix(state ^ (counter & _MASK))
    return _signed(state)


def uniform(key_: int, counter: int) -> float:
    """Return one number in [0, 1) with 53 random bits."""
    return (_mix(((key_ & _MASK) + counter * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def gumbel(key_: int | Tensor, count: int, device: torch.device = CPU) -> Tensor:
    """Return ``count`` standard Gumbel numbers of a key, float32 (count,), or of each of several keys (n, 1).

    ``-log(E)`` with ``E = -log(1 - w)`` exponential and ``w`` uniform.  Small ``E`` win an argmax.  They keep full
    relative precision, because ``w`` with its 53 bits is scaled towards zero before it is rounded to float32.
    """
    state = _strides(count, device) + key_  # int64 arithmetic wraps, as intended
    mixed = _mixed_on_host(state) if device.type == "cpu" else _mixed(state)
    negative = mixed.to(torch.float32).add_(0.5).mul_(-(2.0**-53)).clamp_(min=2.0**-24 - 1.0)  # -w
    return negative.log1p_().neg_().log_().neg_()


class Coupling:
    """A row's Gumbel noise: one vector per position, computed once for its drafts and its target.

    A few positions are computed together: right after a pass the CPU's caches are cold, and the first one costs most.

    Args:
        seed: the row's.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._made: dict[tuple[int, int, torch.device], Tensor] = {}

    def at(self, position: int, count: int, device: torch.device) -> Tensor:
        """Return the noise (count,) of all tokens at a position."""
        if (position, count, device) not in self._made:
            positions = range(position, position + AHEAD)
            keys = [key(self.seed, COUPLING, ahead) for ahead in positions]
            if device.type == "cpu":  # small arrays stay in its caches
                made = [gumbel(key_, count, device) for key_ in keys]
            else:  # each operation is a launch
                made = [*gumbel(on_device(keys, device)[:, None], count, device)]
            self._made |= {(ahead, count, device): noise for ahead, noise in zip(positions, made, strict=True)}
        return self._made[position, count, device]

    def forget(self, end: float) -> None:
        """Drop the noise of positions before the end."""
        self._made = {made: noise for made, noise in self._made.items() if made[0] >= end}


class Silence(Coupling):
    """No noise, for a greedy row among sampled ones."""

    def at(self, position: int, count: int, device: torch.device) -> Tensor:
        """Return zeros (count,)."""
        return torch.zeros(count, device=device)


SILENT = Silence(0)


@lru_cache(maxsize=8)
def _strides(count: int, device: torch.device) -> Tensor:
    """Return what the counters 0, 1, ... add to a key, int64 (count,)."""
    return torch.arange(1, count + 1, device=device) * _signed(_GOLDEN)


def _mixed(state: Tensor) -> Tensor:
    """Return the upper 53 bits of mixed states; works in place."""
    for bits, factor in _ROUNDS:
        shifted = state >> bits
        shifted &= (1 << (64 - bits)) - 1  # torch's shift of negative numbers fills with ones
        state ^= shifted
        if factor is not None:
            state *= _signed(factor)
    state >>= 11
    state &= (1 << 53) - 1
    return state


def _mixed_on_host(state: Tensor) -> Tensor:
    """Return `_mixed` with half the operations: numpy has unsigned numbers, whose shifts are logical."""
    numbers = state.numpy().view(np.uint64)
    shifted = np.empty_like(numbers)
    for bits, factor in _ROUNDS:
        numbers ^= np.right_shift(numbers, np.uint64(bits), out=shifted)
        if factor is not None:
            numbers *= np.uint64(factor)
    numbers >>= np.uint64(11)
    return state


def _mix(state: int) -> int:
    """Return the next number of SplitMix64 in this state: its step, then its finaliser."""
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * _MIX1) & _MASK
    state = ((state ^ (state >> 27)) * _MIX2) & _MASK
    return state ^ (state >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
