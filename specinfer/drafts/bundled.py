"""Drafts that come with the package, for the targets that they were trained for.

Knows: their folder, and the fingerprints of their targets.  Does not know: how they were trained (each has a card).
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from specinfer.drafts.head import HeadDraft, check_fingerprint, read_config
from specinfer.errors import ModelError

FOLDER = Path(__file__).parent / "weights"


def bundled_drafts(target: Any, tokenizer: Any = None) -> list[HeadDraft]:
    """Return the drafts that come with the package for a target model, [] for others: see `bundled_folders`."""
    return [HeadDraft.load(folder) for folder in bundled_folders(target, tokenizer)]


def bundled_folders(target: Any, tokenizer: Any = None) -> list[Path]:
    """Return the folders of the drafts for a target model, in the order they were trained.

    Args:
        target: a ``transformers`` causal LM.
        tokenizer: the target's, compared if given.
    """
    fitting = []
    for folder in sorted(config.parent for config in FOLDER.glob("*/config.json")):
        with suppress(ModelError):
            check_fingerprint(folder.name, read_config(folder)["fingerprint"], target, tokenizer)
            fitting.append(folder)
    return fitting
