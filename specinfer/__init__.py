"""specinfer: tree-based speculative decoding for Hugging Face models, with the target's exact output law.

    from specinfer import SpeculativeDecoder
    decoder = SpeculativeDecoder.from_pretrained()
    print(decoder.generate("Why is the sky blue?", max_new_tokens=64).text)

Names are imported when first used, so that ``import specinfer`` does not wait for torch and transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specinfer.errors import SpecinferError

if TYPE_CHECKING:
    from specinfer.adapt import Auto
    from specinfer.attention import ModelCheck, check_model
    from specinfer.certification import Certificate, certify, certify_verifier
    from specinfer.comparison import Comparison, compare
    from specinfer.decoder import SpeculativeDecoder
    from specinfer.draft import Draft, ModelDraft
    from specinfer.heads import FeatureDraft
    from specinfer.inspection import Inspection, StepInspection, inspect
    from specinfer.ngram import NGramDraft
    from specinfer.plugin import custom_generate
    from specinfer.results import Result, Stats, Step
    from specinfer.row import verify_tree
    from specinfer.run import Run, TextStream
    from specinfer.scoring import Score
    from specinfer.traces import PaperTables, Replay, Trace, paper_tables, record, replay
    from specinfer.tree import BestFirst, Chain, Sampled, TokenTree, Widths, merge
    from specinfer.verify import MultiStep, Verdict, Verifier, Walk

__version__ = "0.1.0"

_HOME = {
    "specinfer.adapt": ("Auto",),
    "specinfer.attention": ("ModelCheck", "check_model"),
    "specinfer.certification": ("Certificate", "certify", "certify_verifier"),
    "specinfer.comparison": ("Comparison", "compare"),
    "specinfer.decoder": ("SpeculativeDecoder",),
    "specinfer.draft": ("Draft", "ModelDraft"),
    "specinfer.heads": ("FeatureDraft",),
    "specinfer.inspection": ("Inspection", "StepInspection", "inspect"),
    "specinfer.ngram": ("NGramDraft",),
    "specinfer.plugin": ("custom_generate",),
    "specinfer.results": ("Result", "Stats", "Step"),
    "specinfer.row": ("verify_tree",),
    "specinfer.run": ("Run", "TextStream"),
    "specinfer.scoring": ("Score",),
    "specinfer.traces": ("PaperTables", "Replay", "Trace", "paper_tables", "record", "replay"),
    "specinfer.tree": ("BestFirst", "Chain", "Sampled", "TokenTree", "Widths", "merge"),
    "specinfer.verify": ("MultiStep", "Verdict", "Verifier", "Walk"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Auto",
    "BestFirst",
    "Certificate",
    "Chain",
    "Comparison",
    "Draft",
    "FeatureDraft",
    "Inspection",
    "ModelCheck",
    "ModelDraft",
    "MultiStep",
    "NGramDraft",
    "PaperTables",
    "Replay",
    "Result",
    "Run",
    "Sampled",
    "Score",
    "SpecinferError",
    "SpeculativeDecoder",
    "Stats",
    "Step",
    "StepInspection",
    "TextStream",
    "TokenTree",
    "Trace",
    "Verdict",
    "Verifier",
    "Walk",
    "Widths",
    "certify",
    "certify_verifier",
    "check_model",
    "compare",
    "custom_generate",
    "inspect",
    "merge",
    "paper_tables",
    "record",
    "replay",
    "verify_tree",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'specinfer' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
