"""A head over whole texts, unrolled as it will draft: what it is trained by.

Knows: successive draft steps, what each attends to.  Does not know: losses, where texts come from.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from specinfer.drafts.head_network import HeadNetwork


def unrolled_logits(head: HeadNetwork, ids: Tensor, states: Tensor, keep: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield a head's logits (N, V') of the N kept tokens in each of several successive draft steps.

    In step s the input at token i is (state, token i).  In step 1 the state is the target's, later the head's own of
    step s - 1 at token i - 1.  It attends to what a tree's node would: tokens with the target's states up to i - s + 1,
    then its own path.

    Args:
        head: bound to the target.
        ids: (B, T).
        states: (B, T, K, H) the target's.
        keep: (N,) which of the B (T - 1) flattened columns.
        steps: how many.
    """
    columns = torch.arange(ids.shape[1] - 1, device=ids.device)
    position_ids = columns.expand(len(ids), -1)
    cache, draft_states = DynamicCache(), None
    for step in range(steps):
        mask = chained_mask(columns, step)[None, None]
        output = head(ids[:, :-1], mask, position_ids, cache, states[:, :-1], draft_states, logits_to_keep=columns[:0])
        (hidden,) = output.hidden_states
        yield head.logits(hidden.flatten(0, 1)[keep])
        draft_states = functional.pad(hidden[:, :-1], (0, 0, 1, 0))


def chained_mask(columns: Tensor, step: int) -> Tensor:
    """Return (T, (step + 1) T) bool: what each token attends to in a draft step, 0 = the first."""
    lag = columns[:, None] - columns  # (T, T) how far a key lies behind the query
    return torch.cat([lag >= step, *(lag == step - earlier for earlier in range(1, step + 1))], 1)
