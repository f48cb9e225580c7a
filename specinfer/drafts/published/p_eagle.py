"""P-EAGLE heads: EAGLE-3's network, which predicts all depths in one pass.

Knows: the masked tokens that stand for those below the root, and their state.
Does not know: how the network is named in checkpoints otherwise (`eagle3`), how trees grow.

Below the root, tokens and states are not known yet.  P-EAGLE (arXiv 2602.01469) learns one token and one state in their
stead.  The pass that feeds the root feeds as many of them after it as depths remain.  Each attends to all before it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from specinfer.attention import TreeModel
from specinfer.drafts.depths import LatticeSession
from specinfer.drafts.language_model import HeadDraftSession
from specinfer.drafts.published.checkpoint import Checkpoint
from specinfer.drafts.published.eagle3 import Eagle3Network, layers_of, load_network, read_config, read_weights
from specinfer.drafts.published.network import OpenSession
from specinfer.engine.draft import DraftContext

MASK_IDS = ("mask_token_id", "pard_token", "ptd_token_id")  # names of the masked token's id
DEPTH = 8  # predicted where a checkpoint does not say for how many it was trained


class PEagleNetwork(Eagle3Network):
    """A P-EAGLE head.

    Attributes:
        mask_token_id: the token below the root.
        depth: how many depths it predicts.

    Args:
        config, token_ids, embeds, outputs: as `Eagle3Network`.
    """

    def build(self, config: LlamaConfig) -> None:
        """Add the layers."""
        super().build(config)
        self.mask_token_id, self.depth = 0, DEPTH
        self.mask_hidden = nn.Parameter(torch.zeros(config.num_aux_layers, self.target_size))


class PEagleSession(LatticeSession, HeadDraftSession):
    """A P-EAGLE head at work: it is fed masked tokens behind the committed ones, and keeps the latter."""

    per_row = HeadDraftSession.per_row

    def __init__(self, model: TreeModel, aux_layers: Sequence[int], context: DraftContext) -> None:
        self.network: PEagleNetwork = model.model
        self.depth = self.network.depth
        slots = {name: getattr(context, name) + self.depth for name in ("capacity", "max_capacity")}
        HeadDraftSession.__init__(self, model, aux_layers, replace(context, **slots))
        self.device = torch.device("cpu")  # of the answers

    def levels_left(self) -> list[int]:
        """Return, per row, how many levels can be predicted: all, if they fit into the head's context."""
        return [self.depth if levels >= self.depth else 0 for levels in HeadDraftSession.levels_left(self)]

    def predict(self) -> Tensor:
        """Feed each row's uncached tokens and the masked ones, keep the former: logits (B, D, V') of depths 1 ... D."""
        self.catch_up()
        chains, masked = self._chains(), [self.network.mask_token_id] * (self.depth - 1)
        layout = self.session.chains([[*chain, *masked] for chain in chains])
        wanted = [range(len(chain) - 1, len(chain) + len(masked)) for chain in chains]
        unknown = self.network.mask_hidden.expand(len(masked), -1, -1)
        states = torch.cat([part for known in self.states for part in (known, unknown)])
        logits = self.session.append(layout, wanted, self.words, target_states=states)
        self.session.commit([range(len(chain)) for chain in chains])
        self.note_cached(0)
        return logits.padded()


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a P-EAGLE head's."""
    named = checkpoint.named("peagle")
    return named if named is not None else bool({"mask_hidden", "model.mask_hidden"} & checkpoint.weights.keys())


def load(checkpoint: Checkpoint) -> tuple[PEagleNetwork, OpenSession]:
    """Return a checkpoint's network and the function that opens its session.

    Raises:
        ModelError: something is missing, unknown or contradictory.
    """
    weights = read_weights(checkpoint)
    mask = weights.get("mask_hidden")
    size = checkpoint.size("target_hidden_size", default=layers_of(checkpoint).size("hidden_size"))
    if mask is not None and mask.numel() % size == 0:
        weights["mask_hidden"] = mask.reshape(-1, size)
    network = load_network(checkpoint, weights, read_config(checkpoint, weights), PEagleNetwork)
    network.mask_token_id = _mask_token_id(checkpoint, network.vocab_size)
    network.depth = _depth(checkpoint)
    return network, PEagleSession


def _mask_token_id(checkpoint: Checkpoint, vocab_size: int) -> int:
    """Return the masked token's id."""
    found = next((checkpoint.config[name] for name in MASK_IDS if checkpoint.config.get(name) is not None), None)
    if type(found) is not int or not 0 <= found < vocab_size:
        raise checkpoint.refuse(f"its {MASK_IDS[0]} is {found!r:.40}, not the id of a token")
    return found


def _depth(checkpoint: Checkpoint) -> int:
    """Return how many depths a checkpoint was made to predict."""
    methods = (checkpoint.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return checkpoint.part(methods[0]).size("speculative_tokens", default=DEPTH)
