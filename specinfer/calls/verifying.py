"""One tree verified on given logits, so that rules can be compared without a model.

Knows: what a caller may give.  Does not know: how rules work, models.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specinfer.common.values import plain
from specinfer.engine.sampling import resolve
from specinfer.engine.sequence import Row, target_views
from specinfer.engine.verify import Verdict, Verifier, chosen_verifier
from specinfer.errors import InputError
from specinfer.prompts import check_ids
from specinfer.tree import Forest, TokenTree


def verify_tree(
    tree: TokenTree,
    logits: Tensor,
    *,
    verifier: Verifier | None = None,
    prefix: Sequence[int] = (),
    seed: int = 0,
    **options: Any,
) -> Verdict:
    """Verify one tree on given logits, as a decode step does.  No model is needed, so rules are easy to compare.

    Args:
        tree: of N nodes.
        logits: (N, V), the target's after each node.
        verifier: the rule; None is the usual one for the tree's kind.
        prefix: the token ids before the root: processors read them, and noise depends on how many there are.
        seed: of all random numbers.
        **options: any ``GenerationConfig`` field: temperature, top_p, ...; greedy without.

    Returns:
        Verdict: accepted nodes, and the token after them.

    Raises:
        InputError: logits of another shape or vocabulary than the tree's; a bad prefix or seed.
        PairingError: the rule would be biased on trees of this kind.
        SamplingError: an option that is unknown or impossible, by name.
        NumericalError: nothing can be chosen from the logits.
    """
    fits = isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(tree)
    if not fits or logits.shape[1] <= int(tree.tokens.max()):
        raise InputError(
            f"logits {tuple(getattr(logits, 'shape', ()))} for a tree of {len(tree)} nodes with ids up to "
            f"{int(tree.tokens.max())}: give a tensor with one row of the target's logits for each node"
        )
    if any(len(distribution) != logits.shape[1] for distribution in tree.distributions.values()):
        raise InputError(f"the logits are over {logits.shape[1]} tokens, the tree's distributions are not: pad or cut")
    if isinstance(seed, bool) or not isinstance(seed := plain(seed), int):
        raise InputError(f"seed={seed!r:.60}: give one whole number")
    rule = chosen_verifier(verifier, tree.kind)
    ids = [*plain(prefix), int(tree.tokens[0])]
    check_ids([ids], logits.shape[1])
    settings = resolve(GenerationConfig(), vocab_size=logits.shape[1], **options)
    row = Row(0, ids, settings, 1, seed, logits.device)
    with torch.inference_mode():
        return rule.verify(tree, target_views([row], Forest.of([tree]), [logits])[0])
