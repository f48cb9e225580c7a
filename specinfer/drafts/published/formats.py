"""Published heads as drafts: which format a checkpoint has, and the draft of any of them.

Knows: the formats, what every one has to say of itself.  Does not know: their networks (a module each).

A head is measured when it is first used with a target (`conventions`); what was found is kept in the cache folder.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Protocol

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specinfer.attention import TreeModel, running
from specinfer.common.files import cache_folder, parse_json, read_json, weights_digest, write_json
from specinfer.common.records import Record
from specinfer.drafts.head import target_fingerprint
from specinfer.drafts.published import dflash, eagle, eagle3, medusa, p_eagle
from specinfer.drafts.published.checkpoint import Checkpoint, hub_config
from specinfer.drafts.published.conventions import LEAST, Convention, agreement, choose, write_text
from specinfer.drafts.published.network import DraftNetwork, OpenSession, attached_model, check_readable
from specinfer.engine.draft import Draft, DraftContext, DraftSession
from specinfer.errors import InputError, ModelError, SpecinferError, one_line

FAMILIES = (p_eagle, eagle3, eagle, dflash, medusa)  # the first that recognises a checkpoint loads it
# fields of a head's configuration alone; a plain one of a single layer may be an EAGLE head's
MARKS = {
    *("speculators_model_type", "draft_vocab_size", "block_size"),
    *("eagle_config", "medusa_num_heads", "dflash_config"),
}
WORDS = ("eagle", "dflash", "jetspec", "dspark", "domino", "medusa", "speculator")  # in names of architectures


class Network(Protocol):
    """The interface of a published head's network beside its passes (`network.DraftNetwork`)."""

    target_size: int  # hidden size of the targets that it reads
    vocab_size: int  # of these targets

    def conventions(self, layers: int) -> Sequence[Convention]:
        """Return the readings that a target of this depth allows, first the one that the format prescribes."""

    def bound(self, target: PreTrainedModel) -> nn.Module:
        """Return a copy that is bound to a target."""


class PublishedDraft(Draft):
    """A published head as a draft.

    Attributes:
        least: share of first choices that must be the target's, else the head is refused; 0 refuses none.

    Args:
        name: in results.
        network: of the head.
        session: opens a session: of (model, aux_layers, context), where the model is a `TreeModel` of the network, or
            the network itself if it is no `DraftNetwork`: then it runs behind no mask.
        digest: of its weights, for the file of measurements; "" keeps none.
        convention: how it is read; None measures that when it is attached.
    """

    may_wait = True

    def __init__(
        self, name: str, network: Network, session: OpenSession, digest: str = "", convention: Convention | None = None
    ) -> None:
        self.name, self.network, self.session, self.digest = name, network, session, digest
        self.convention, self.least = convention, LEAST

    def attach(self, target: TreeModel, tokenizer: PreTrainedTokenizerBase | None = None) -> "PublishedDraft":
        """Return this draft with the matrices that it borrows from a target, under the convention that fits it.

        Raises:
            ModelError: the sizes are another target's, or it fits under no convention.
            UnsupportedModel: the target hands out no hidden states.
        """
        check_readable(self.name, target)
        config = target.model.config.get_text_config(decoder=True)
        for what, wanted in (("hidden_size", self.network.target_size), ("vocab_size", self.network.vocab_size)):
            if (found := getattr(config, what)) != wanted:
                raise ModelError(
                    f"draft {self.name} is for a target with {what} {wanted}, not {found}: choose another head"
                )
        rules = [self.convention] if self.convention else list(self.network.conventions(config.num_hidden_layers))
        for rule in rules:
            if bad := [layer for layer in rule.aux_layers if not 0 <= layer <= config.num_hidden_layers]:
                raise ModelError(f"draft {self.name} reads layer {bad[0]} of a target with {config.num_hidden_layers}")
        if self.convention:
            return self._under(rules[0], target)
        measured = self._measured(rules, target, tokenizer)
        best, note = choose(self.name, measured, self.least)
        attached = self._under(best, target)
        order = sorted(measured, key=lambda rule: rule != best)
        attached.agreements = [(str(rule), measured[rule]) for rule in order]
        attached.notes = (note,)
        return attached

    def open(self, context: DraftContext) -> DraftSession:
        """Start drafting for a batch of rows."""
        return self.session(attached_model(self), self.aux_layers, context)

    def _under(self, rule: Convention, target: TreeModel) -> "PublishedDraft":
        """Return a copy bound to a target under a convention."""
        network = self.network.bound(target.model)
        for name, value in rule.options:
            setattr(network, name, value)
        attached = copy(self)
        # a network that is no `DraftNetwork` runs behind no mask
        attached.model = TreeModel(network) if isinstance(network, DraftNetwork) else network
        attached.aux_layers, attached.convention = rule.aux_layers, rule
        return attached

    def _measured(
        self, rules: Sequence[Convention], target: TreeModel, tokenizer: PreTrainedTokenizerBase | None
    ) -> dict[Convention, list[float]]:
        """Return the agreement under each convention: what was kept of an earlier measurement, or a new one."""
        path, words = self._record(rules, target, tokenizer), [str(rule) for rule in rules]
        kept = None
        with suppress(InputError):  # a damaged record is made anew
            kept = read_json(path) if path else None
        if isinstance(kept, dict) and list(kept) == words:
            return dict(zip(rules, kept.values(), strict=True))
        text = write_text(target, tokenizer, sorted({layer for rule in rules for layer in rule.aux_layers}))
        measured = {}
        for rule in rules:
            draft = self._under(rule, target)
            with running(*[draft.model] if isinstance(draft.model, TreeModel) else []):
                measured[rule] = agreement(draft.open, text, target)
        if path is not None:
            with suppress(SpecinferError, OSError):  # then it is measured again next time
                write_json(path, dict(zip(words, measured.values(), strict=True)))
        return measured

    def _record(
        self, rules: Sequence[Convention], target: TreeModel, tokenizer: PreTrainedTokenizerBase | None
    ) -> Path | None:
        """Return the file that a measurement is kept in; None if it cannot be kept."""
        if not self.digest or tokenizer is None:
            return None
        parts = [self.digest, target_fingerprint(target.model, tokenizer), str(target.dtype), [str(r) for r in rules]]
        name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return cache_folder() / "drafts" / f"{self.name}-{name}.json"


def draft_config(name: str) -> Record:
    """Return the ``config.json`` of a folder or of a repository of the hub; {} if it cannot be read."""
    folder = Path(os.path.expanduser(name))
    with suppress(OSError, ValueError, ModelError):  # then it is tried as a language model, which says more
        path = folder / "config.json" if folder.is_dir() else hub_config(name)
        found = parse_json(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def may_be_head(config: Record) -> bool:
    """Return whether a configuration may be a head's, and not a language model's."""
    architectures = str(config.get("architectures")).lower()
    return bool(
        MARKS & config.keys() or any(word in architectures for word in WORDS) or config.get("num_hidden_layers") == 1
    )


def load_published(name: str | os.PathLike[str], convention: Convention | None = None) -> PublishedDraft | None:
    """Load a published head from a folder or the hub; None if it is none of the formats that are known.

    Args:
        name: of the folder or repository.
        convention: how it is read; None measures that when it is attached.

    Raises:
        ModelError: it is a head, and something is missing, unknown or damaged; one line says what.
    """
    checkpoint = Checkpoint.find(name)
    for family in FAMILIES:
        if family.recognises(checkpoint):
            try:
                network, session = family.load(checkpoint)
            except ModelError:
                raise
            except Exception as error:  # a value of a wrong type may raise anything
                raise checkpoint.refuse(f"it is damaged ({one_line(error)})") from error
            digest = f"{weights_digest(checkpoint.folder)} {json.dumps(checkpoint.config, sort_keys=True)}"
            return PublishedDraft(checkpoint.name, network, session, digest, convention)
    return None
