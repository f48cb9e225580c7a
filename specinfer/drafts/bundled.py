"""Drafts that come with the package, for the targets that they were trained for.

Knows: their folder, and the fingerprints of their targets.  Does not know: how they were trained (each has a card).
"""

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specinfer.drafts.head import HeadDraft, check_fingerprint, read_config
from specinfer.errors import ModelError

FOLDER = Path(__file__).parent / "weights"


def bundled_drafts(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Iterator[HeadDraft]:
    """Load the drafts that come with the package for a target model, if any: see `bundled_folders`."""
    return map(HeadDraft.load, bundled_folders(target, tokenizer))


def bundled_folders(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> Iterator[Path]:
    """Find the folders of the drafts for a target model, in the order they were trained.

    Args:
        target: a ``transformers`` causal LM.
        tokenizer: the target's, compared if given.
    """
    for folder in sorted(config.parent for config in FOLDER.glob("*/config.json")):
        try:
            check_fingerprint(folder.name, read_config(folder)["fingerprint"], target, tokenizer)
        except ModelError:
            continue
        yield folder
