"""What a trace says about its drafts: hits by depth and rank, and whether probabilities mean what they say.

Knows: ranks, probabilities and whether they came true.  Does not know: models, trees, verification.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specinfer.evaluation.traces.trace import Trace


@dataclass(frozen=True)
class HitTable:
    """How often the target's token was a draft's first choice, second choice, ..., by depth."""

    draft: str
    counts: NDArray[
        np.int64
    ]  # (depth, rank): the target's token stood at this place, at depth 1, 2, ... below the root
    tried: NDArray[np.int64]  # (depth,): positions at which the draft was asked

    @property
    def rates(self) -> NDArray[np.float64]:
        """The share of positions with the target's token at exactly this place, (depth, rank); NaN where none tried."""
        with np.errstate(invalid="ignore"):
            return self.counts / self.tried[:, None]

    @property
    def within(self) -> NDArray[np.float64]:
        """The share of positions with the target's token among the first 1, 2, ... places, (depth, rank)."""
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


def hits(trace: Trace, draft: int | str = 0) -> HitTable:
    """Count at which place of a draft's candidates the target's tokens stood, along all texts of a trace.

    Every position of a text counts, whether or not a step of some policy would begin there.  At depth j the draft has
    drafted the j - 1 tokens before by itself.  When sampling, candidates are ranked by the shared noise.

    Raises:
        InputError: there is no such draft.
    """
    place = trace.draft(draft)
    depth, top = trace.texts[0].drafted[place].tokens.shape[1:]
    counts, tried = np.zeros((depth, top), np.int64), np.zeros(depth, np.int64)
    for text in trace.texts:
        ranks = text.ranks(place)
        tried += trace.asked(text).sum(0)
        levels, _ = np.broadcast_arrays(np.arange(depth), ranks)
        np.add.at(counts, (levels[ranks >= 0], ranks[ranks >= 0]), 1)
    return HitTable(trace.drafts[place], counts, tried)


def calibration(trace: Trace, draft: int | str = 0, bins: int = 10) -> CalibrationCurve:
    """Compare a draft's probabilities of its candidates, at all nodes on the texts, with how often they were right.

    When sampling, these are the estimates by which best-first trees rank: the chance, given the noise, that the target
    chooses the candidate.

    Raises:
        InputError: there is no such draft.
    """
    place = trace.draft(draft)
    said, came = [np.zeros(0)], [np.zeros(0, bool)]
    for text in trace.texts:
        own = text.drafted[place]
        real = own.tokens >= 0  # (n, D, k)
        said.append(np.exp(own.log_probs[real], dtype=np.float64))
        came.append((np.arange(own.tokens.shape[2]) == text.ranks(place)[:, :, None])[real])
    probability, accepted = np.concatenate(said), np.concatenate(came)
    bin_ = np.minimum((probability * bins).astype(int), bins - 1)
    count = np.bincount(bin_, minlength=bins)
    true, total = np.bincount(bin_, accepted, bins), np.bincount(bin_, probability, bins)
    low, high = wilson(true, count)
    with np.errstate(invalid="ignore"):
        return CalibrationCurve(trace.drafts[place], total / count, true / count, count, low, high)


def wilson(true: np.ndarray, count: np.ndarray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bounds of the 95 % score interval of true / count (Wilson 1927); NaN where count is 0."""
    z = 1.959964
    with np.errstate(invalid="ignore", divide="ignore"):
        share, spread = true / count, z * z / count
        middle = (share + spread / 2) / (1 + spread)
        half = np.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return middle - half, middle + half
