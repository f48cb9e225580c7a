"""Statistics of a trace's drafts: hits by depth and rank, and the calibration of their probabilities.

Knows: ranks, probabilities, the target's tokens.  Does not know: models, trees, verification.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specinfer.evaluation.traces.trace import Trace


@dataclass(frozen=True)
class HitTable:
    """How often the target's token was a draft's first choice, second choice, ..., by depth below the root."""

    draft: str
    counts: NDArray[np.int64]  # (depth, rank): positions with the target's token at this rank
    tried: NDArray[np.int64]  # (depth,): positions at which the draft was asked

    @property
    def rates(self) -> NDArray[np.float64]:
        """The share of positions with the target's token at exactly this rank, (depth, rank); NaN where none tried."""
        with np.errstate(invalid="ignore"):
            return self.counts / self.tried[:, None]

    @property
    def within(self) -> NDArray[np.float64]:
        """The share of positions with the target's token among the first 1, 2, ... ranks, (depth, rank)."""
        return self.rates.cumsum(1)


@dataclass(frozen=True)
class CalibrationCurve:
    """A draft's probabilities against how often the tokens were the target's, in bins of equal width."""

    draft: str
    probability: NDArray[np.float64]  # (bins,): the draft's mean in the bin; NaN in an empty one, as below
    accepted: NDArray[np.float64]  # (bins,): the share that was the target's token
    count: NDArray[np.signedinteger]  # (bins,)
    low: NDArray[np.float64]  # (bins,): bounds of the 95 % Wilson interval of `accepted`
    high: NDArray[np.float64]  # (bins,)

    @property
    def error(self) -> float:
        """The expected calibration error: the mean of |probability - accepted| over all candidates; NaN of none."""
        gaps = np.nan_to_num(np.abs(self.probability - self.accepted))
        return float(np.average(gaps, weights=self.count)) if self.count.any() else float("nan")

    @property
    def chance(self) -> float:
        """About the error that would be expected of probabilities that are right, since bins are finite; NaN of none.

        That is the mean absolute deviation of a bin's share, sqrt(2 p (1 - p) / (pi n)), as of a normal distribution.
        """
        spread = np.nan_to_num(self.probability * (1 - self.probability)) * self.count
        total = self.count.sum()
        return float(np.sqrt(2 / np.pi * spread).sum() / total) if total else float("nan")


def hits(trace: Trace, draft: int | str = 0) -> HitTable:
    """Count the ranks of the target's tokens among a draft's candidates, along all texts of a trace.

    Every position of a text counts, whether or not a step of some policy would begin there.  At depth j the draft has
    drafted the j - 1 tokens before by itself.  When sampling, candidates are ranked by the shared noise.

    Raises:
        InputError: no draft has the name or index.
    """
    index = trace.draft(draft)
    depth, top = trace.texts[0].drafted[index].tokens.shape[1:]
    counts, tried = np.zeros((depth, top), np.int64), np.zeros(depth, np.int64)
    for text in trace.texts:
        ranks = text.ranks(index)
        tried += trace.asked(text).sum(0)
        np.add.at(counts, (np.nonzero(ranks >= 0)[1], ranks[ranks >= 0]), 1)
    return HitTable(trace.drafts[index], counts, tried)


def calibration(trace: Trace, draft: int | str = 0, bins: int = 10) -> CalibrationCurve:
    """Compare a draft's probabilities of its candidates, at all nodes on the texts, with how often they were right.

    When sampling, these are the estimates that best-first trees rank by: the probability, given the noise, that the
    target chooses the candidate.

    Raises:
        InputError: no draft has the name or index.
    """
    index = trace.draft(draft)
    estimates, right = [np.zeros(0)], [np.zeros(0, bool)]
    for text in trace.texts:
        drafted = text.drafted[index]
        real = drafted.tokens >= 0  # (n, D, k)
        estimates.append(np.exp(drafted.log_probs[real], dtype=np.float64))
        right.append((np.arange(real.shape[2]) == text.ranks(index)[:, :, None])[real])
    return curve(trace.drafts[index], np.concatenate(estimates), np.concatenate(right), bins)


def curve(name: str, probability: np.ndarray, accepted: np.ndarray, bins: int) -> CalibrationCurve:
    """Return how often tokens were accepted, (n,), in bins of equal width of their probability, (n,)."""
    bin_ = np.minimum((probability * bins).astype(int), bins - 1)
    count = np.bincount(bin_, minlength=bins)
    true, total = np.bincount(bin_, accepted, bins), np.bincount(bin_, probability, bins)
    low, high = wilson(true, count)
    with np.errstate(invalid="ignore"):
        return CalibrationCurve(name, total / count, true / count, count, low, high)


def wilson(true: np.ndarray, count: np.ndarray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bounds of the 95 % score interval of true / count (Wilson 1927); NaN where count is 0."""
    z = 1.959964
    with np.errstate(invalid="ignore", divide="ignore"):
        share, spread = true / count, z * z / count
        middle = (share + spread / 2) / (1 + spread)
        half = np.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return middle - half, middle + half
