"""What a head can learn from its own use: windows of texts, with what the target said where they were written.

Knows: one row's tokens and states, the target's logits along the accepted path, how many bytes are kept.
Does not know: optimisation, which weights are in use, calls.

Where a head was wrong, the target's distribution is what it should have said (Online Speculative Decoding, arXiv
2310.07177, section 4).  Of the distribution the likeliest tokens are kept, and the mass of the rest as one number.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specinfer.common.tensors import on_device
from specinfer.drafts.head_network import HeadNetwork
from specinfer.drafts.unrolled import unrolled_logits
from specinfer.engine.draft import Scored

CONTEXT, LONGEST = 96, 192  # tokens of a window: before those that are learnt, at most; in all, about
KEPT = 16  # of the target's likeliest tokens at every position
RIGHT = 0.3  # weight of a token that the head had proposed; 1 where it was wrong
CAPACITY = 64 << 20  # bytes of all windows
HELD_OUT = 8  # every eighth window is never learnt from
UNROLL, DECAY = 2, 0.8  # successive draft steps that are learnt, and the weight of the second


class Example(NamedTuple):
    """One window of T tokens, the last N of which the target chose in view of the head."""

    ids: Tensor  # (T,) int64
    states: Tensor  # (T, K, H) bfloat16, the target's states that chose each token; zeros for a text's first
    tokens: Tensor  # (N, k) the target's likeliest tokens, in the head's vocabulary
    log_probs: Tensor  # (N, k) float32, among all tokens of the head's vocabulary
    weights: Tensor  # (N,) float32

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return sum(column.nbytes for column in self)


class ExampleBuffer:
    """The newest examples of all rows and calls, bounded in bytes; any thread may add.

    Args:
        capacity: bytes at most; the oldest examples are forgotten.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity, self.nbytes, self.added = capacity, 0, 0
        self._examples: deque[tuple[bool, Example]] = deque()  # held out or not
        self._lock = Lock()

    def add(self, example: Example) -> None:
        """Keep an example, in the place of the oldest ones."""
        with self._lock:
            self._examples.append((self.added % HELD_OUT == 0, example))
            self.added += 1
            self.nbytes += example.nbytes
            while self.nbytes > self.capacity:
                self.nbytes -= self._examples.popleft()[1].nbytes

    def examples(self, held_out: bool) -> list[Example]:
        """Return the examples to learn from, or those that are held out, the oldest first."""
        with self._lock:
            return [example for held, example in self._examples if held == held_out]


class Recorder:
    """One row's window under way.

    Args:
        prompt: token ids.
        states: (n, K, H), the target's states that chose each of them; zeros for the first.
        draft: the head's id in trees.
    """

    def __init__(self, prompt: Sequence[int], states: Tensor, draft: int) -> None:
        self.draft = draft
        self.begin(prompt, states)

    def begin(self, ids: Sequence[int], states: Tensor) -> None:
        """Begin a window with the last of these tokens as context."""
        self.ids, self.states = list(ids[-CONTEXT:]), [states[-CONTEXT:].to(torch.bfloat16, copy=True)]
        self.tokens: list[Tensor] = []
        self.log_probs: list[Tensor] = []
        self.weights: list[float] = []

    def extend(self, new: Sequence[int], states: Tensor, scored: Scored, token_ids: Tensor) -> None:
        """Note what a step committed.

        Args:
            new: the tokens of an accepted path and the one after them, n.
            states: (n, K, H), which chose them.
            scored: the step's tree and logits.
            token_ids: (V',) the head's vocabulary.
        """
        path = scored.tree.along(new[:-1])
        logits = scored.logits[on_device(path, scored.logits.device)][:, token_ids].float()
        top = logits.topk(min(KEPT, logits.shape[1]))
        proposed = scored.tree.nodes.proposers[path[1:]] >> self.draft & 1
        self.ids += new
        self.states.append(states.bfloat16())
        self.tokens.append(top.indices)
        self.log_probs.append(top.values - logits.logsumexp(-1, keepdim=True))
        self.weights += [*(RIGHT if right else 1.0 for right in proposed), 1.0]

    def example(self) -> Example:
        """Return the window so far, and begin the next one with its end."""
        states = torch.cat(self.states)
        weights = torch.tensor(self.weights, device=states.device)
        ids = torch.tensor(self.ids, device=states.device)
        example = Example(ids, states, torch.cat(self.tokens), torch.cat(self.log_probs), weights)
        self.begin(self.ids, states)
        return example


def example_loss(head: HeadNetwork, examples: Iterable[Example]) -> Tensor:
    """Return a head's mean weighted loss over examples: forward Kullback-Leibler divergence, plus a constant.

    The tokens that are not among the k likeliest count as one.

    Args:
        head: bound to the target.
        examples: one or more.
    """
    ids, states, tokens, log_probs, weights = zip(*examples, strict=True)
    padded, padded_states = pad_sequence([*ids], True), pad_sequence([*states], True)
    columns = torch.arange(padded.shape[1] - 1, device=padded.device)
    rows = [(columns >= len(i) - 1 - len(w)) & (columns < len(i) - 1) for i, w in zip(ids, weights, strict=True)]
    keep = torch.stack(rows).flatten().nonzero()[:, 0]
    wanted, p, weight = torch.cat(tokens), torch.cat(log_probs).exp(), torch.cat(weights)
    rest = (1 - p.sum(-1)).clamp(min=0)
    loss = weight.new_zeros(())
    for step, logits in enumerate(unrolled_logits(head, padded, padded_states, keep, UNROLL)):
        log_q = logits.float().log_softmax(-1).gather(1, wanted)
        log_rest = (1 - log_q.exp().sum(-1)).clamp(min=1e-6).log()
        losses = -(p * log_q).sum(-1) - rest * log_rest
        loss = loss + DECAY**step * (losses * weight).sum() / weight.sum()
    return loss
