"""What decoding takes: clocks over the sessions of a batch, and what they show.

Knows: sessions, their passes and seconds.  Does not know: which rows are decoded, how.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from time import perf_counter

from specinfer.attention import TreeSession
from specinfer.engine.drafting import Drafting
from specinfer.results import Seconds


@dataclass(frozen=True)
class Reading:
    """What was spent until a moment, or between two."""

    seconds: Seconds = field(default_factory=Seconds)
    passes: int = 0  # of the target, those that read prompts excluded
    drafting: tuple[tuple[int, float], ...] = ()  # per draft, its passes and the seconds in its proposals

    def __sub__(self, earlier: "Reading") -> "Reading":
        """Return what was spent since an earlier reading of the same clocks."""
        pairs = zip_longest(self.drafting, earlier.drafting, fillvalue=(0, 0.0))
        drafting = tuple((passes - before, spent - then) for (passes, spent), (before, then) in pairs)
        return Reading(self.seconds - earlier.seconds, self.passes - earlier.passes, drafting)


class Clocks:
    """The clocks of a batch.  They run while it is decoded, and stand still between two steps.

    Attributes:
        now: the newest reading.
    """

    def __init__(self) -> None:
        self.now = Reading()
        self.resume()

    def resume(self) -> None:
        """Go on: the time since the newest reading was the caller's."""
        self.started = perf_counter()

    def read(self, target: TreeSession, drafts: Sequence[Drafting]) -> Reading:
        """Return what was spent since the newest reading; this one takes its place."""
        before, started = self.now, self.started
        self.resume()
        seconds = Seconds(
            total=before.seconds.total + self.started - started,
            prefill=target.prefill_seconds + sum(draft.prefill_seconds for draft in drafts),
            target=target.seconds,
            draft=sum(draft.seconds for draft in drafts),
        )
        self.now = Reading(seconds, target.passes, tuple((draft.passes, draft.proposing) for draft in drafts))
        return self.now - before

    def learnt(self) -> None:
        """Take the time since `resume` for what drafts learn at the end."""
        spent, seconds = perf_counter() - self.started, self.now.seconds
        self.now = replace(self.now, seconds=replace(seconds, total=seconds.total + spent, learning=spent))
