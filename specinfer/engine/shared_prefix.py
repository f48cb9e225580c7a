"""Prompts that begin alike: what they share is read once, and copied.

Knows: token ids, the target's sessions.  Does not know: drafts, decoding.

One beginning is kept, such as a system prompt or few-shot examples.  Drafts read whole prompts: that costs little.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor

from specinfer.attention import TreeModel, TreeSession
from specinfer.common.tensors import concat

LEAST = 16  # tokens of a beginning; shorter ones are not worth a pass of their own


class SharedPrefix:
    """The beginning that prompts of a run share, as the target read it."""

    def __init__(self) -> None:
        self.ids: Sequence[int] = ()
        self.session: TreeSession | None = None
        self.states: Tensor | None = None  # auxiliary hidden states, (tokens, K, H)
        self.before: Sequence[int] = ()  # the prompt that came last

    def open(self, model: TreeModel, *sizes: Any) -> TreeSession:
        """Open a session that reads prompts: see `TreeModel.session`."""
        return model.session(*sizes)

    def prefill(
        self, session: TreeSession, prompts: Sequence[Sequence[int]], hold: bool = False
    ) -> list[Tensor | None]:
        """Read prompts into a new session, as `TreeSession.prefill` does, but what is known already is copied.

        Args:
            session: of the target; nothing was read yet.
            prompts: token ids per row, possibly none.
            hold: as `TreeSession.prefill`.

        Returns:
            what `TreeSession.prefill` returns, for whole prompts.
        """
        length = 0 if session.model.stateful else self._find(session, prompts)
        self.before = prompts[-1]
        if self.session is None or not length:
            return session.prefill(prompts, hold=hold)
        session.begin_with(self.session, length)
        rest = session.prefill([prompt[length:] for prompt in prompts], hold=hold)
        if self.states is None:
            return rest
        known = self.states[:length]
        return [concat([known, states]) for states in rest]

    def _find(self, session: TreeSession, prompts: Sequence[Sequence[int]]) -> int:
        """Return how many tokens all prompts share with what is kept; keep a longer beginning if there is one."""
        shared = common(prompts)
        known = len(common([self.ids, shared]))
        found = shared if len(prompts) > 1 else common([self.before, shared])
        if len(found) - known >= LEAST:
            self._keep(session, found)
            return len(found)
        return known if known >= LEAST else 0

    def _keep(self, session: TreeSession, ids: Sequence[int]) -> None:
        """Read a beginning into a session of one row."""
        self.ids, self.session = ids, session.fresh(1, len(ids))
        (self.states,) = self.session.prefill([ids])
        session.prefill_seconds += self.session.prefill_seconds


def common(texts: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all texts begin with."""
    return [each[0] for each in takewhile(lambda each: len({*each}) == 1, zip(*texts, strict=False))]
