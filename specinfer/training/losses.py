"""The losses of drafts, against a target's distribution or its chosen tokens.

Knows: draft steps, columns to learn, hit rates.  Does not know: optimisation, where texts come from, files.

A draft learns the target's distribution (forward Kullback-Leibler divergence: cross entropy against the target's
probabilities), or the token that the target chose (SpecInfer, arXiv 2305.09781, section 3).  A head is unrolled: from
its second step on it reads its own states, as it will below the root of a tree (EAGLE-3, arXiv 2503.01840,
training-time test).  Boost-tuning (SpecInfer, section 3): tokens that an earlier draft proposes first weigh little for
the next draft, so that together they cover more.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nn import functional
from transformers import PreTrainedModel

from specinfer.drafts.head_network import HeadNetwork
from specinfer.drafts.unrolled import unrolled_logits
from specinfer.training.data import Batch
from specinfer.training.job import TrainingSettings
from specinfer.training.logits import TargetLogits

RANKS = 5  # hit rates are measured for the 1, 2, ... RANKS first proposals


class DistillationLoss(nn.Module):
    """A draft's loss over a batch, as one ``forward``, so that any wrapper may distribute it.

    Args:
        target: the target model.
        settings: how the draft is trained.
        token_ids: (V',) ascending, the tokens that the draft may propose; None = all.
    """

    def __init__(self, target: PreTrainedModel, settings: TrainingSettings, token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.settings, self.token_ids = settings, token_ids
        self.target_logits = TargetLogits(target, token_ids)

    def draft_logits(self, ids: Tensor, states: Tensor, keep: Tensor) -> Iterator[Tensor]:
        """Yield the draft's logits (N, V') of the tokens to learn, one draft step after the other.

        Args:
            ids: (B, T).
            states: (B, T, K, H).
            keep: (N,) which of the B (T - 1) flattened columns.
        """
        raise NotImplementedError

    def forward(self, ids: Tensor, states: Tensor, learn: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and by draft step how often the target's choice was the proposal of each rank.

        The latter as counts, int64 (steps, RANKS).

        Args:
            ids: (B, T).
            states: (B, T, K, H), the last layer being the target's output.
            learn: (B, T - 1) bool, tokens i + 1 to learn.
            weights: (N,) of those tokens.
        """
        keep = learn.flatten().nonzero()[:, 0]
        tokens, distribution = self.goal(ids[:, 1:].flatten()[keep], states[:, 1:, -1].flatten(0, 1)[keep])
        loss, hits = states.new_zeros((), dtype=torch.float32), []
        for step, logits in enumerate(self.draft_logits(ids, states, keep)):
            if distribution is None:
                losses = functional.cross_entropy(logits.float(), tokens, ignore_index=-1, reduction="none")
            else:
                losses = SoftCrossEntropy.apply(logits, distribution)
            total = weights.sum().clamp(min=1e-9)  # a boost of 0 may leave nothing
            loss = loss + self.settings.decay**step * (losses * weights).sum() / total
            hits.append((logits.detach().topk(RANKS, -1).indices == tokens[:, None]).sum(0))
        return loss, torch.stack(hits)

    def goal(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the N tokens as indices in the draft's vocabulary, -1 = not in it, and the target's distribution.

        The distribution (N, V') is over the draft's vocabulary; None where the draft learns tokens.
        """
        if self.token_ids is not None:
            indices = torch.searchsorted(self.token_ids, tokens).clamp(max=len(self.token_ids) - 1)
            tokens = torch.where(self.token_ids[indices] == tokens, indices, -1)
        if self.settings.loss != "kl":
            return tokens, None
        with torch.no_grad():
            return tokens, self.target_logits(states).float().softmax(-1)


class HeadLoss(DistillationLoss):
    """A head's loss, unrolled over several draft steps."""

    def __init__(self, head: HeadNetwork, target: PreTrainedModel, settings: TrainingSettings) -> None:
        super().__init__(target, settings, head.token_ids)
        self.head = head

    def draft_logits(self, ids: Tensor, states: Tensor, keep: Tensor) -> Iterator[Tensor]:
        """See `unrolled_logits`."""
        return unrolled_logits(self.head, ids, states, keep, self.settings.unroll)


class CausalLMLoss(DistillationLoss):
    """A causal language model's loss: one draft step."""

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, settings: TrainingSettings) -> None:
        super().__init__(target, settings)
        self.model, self.model_logits = model, TargetLogits(model)

    def draft_logits(self, ids: Tensor, states: Tensor, keep: Tensor) -> Iterator[Tensor]:
        """Yield once; the target's states are not read."""
        hidden = self.model.base_model(ids[:, :-1], use_cache=False).last_hidden_state
        yield self.model_logits(hidden.flatten(0, 1)[keep])


def first_logits(head: HeadNetwork, batch: Batch) -> Tensor:
    """Return a head's logits (N, V') of the N tokens to learn in its first draft step."""
    return next(unrolled_logits(head, batch.ids, batch.states, batch.learn.flatten().nonzero()[:, 0], 1))


class SoftCrossEntropy(torch.autograd.Function):
    """Cross entropy (N,) of logits (N, V) against distributions (N, V).

    ``forward`` already makes the gradient, softmax(logits) - distribution.  This takes a third of autograd's memory
    traffic, on which the training of a small head with a large vocabulary spends its time.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, distribution: Tensor) -> Tensor:
        """Return the cross entropies, float32."""
        values = logits.float()
        total = values.logsumexp(-1, keepdim=True)
        expected = torch.linalg.vecdot(values, distribution)
        ctx.save_for_backward((values - total).exp_().sub_(distribution).to(logits.dtype))
        return total[:, 0] - expected

    @staticmethod
    def backward(ctx: BackwardCFunction, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        (difference,) = ctx.saved_tensors
        return difference * gradient.to(difference.dtype)[:, None], None


@torch.no_grad()
def boost_weights(earlier: Sequence[HeadNetwork], batch: Batch, boost: float) -> Tensor:
    """Return the weight (N,) of every token to learn: ``boost`` where an earlier head proposes it first, else 1."""
    tokens = batch.ids[:, 1:][batch.learn]
    weights = torch.ones(len(tokens), device=tokens.device)
    for head in earlier:
        weights[head.token_ids[first_logits(head, batch).argmax(-1)] == tokens] = boost
    return weights
