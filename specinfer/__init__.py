"""specinfer: tree-based speculative decoding for Hugging Face models, with the target's exact output distribution.

    from specinfer import SpeculativeDecoder
    decoder = SpeculativeDecoder.from_pretrained()
    print(decoder.generate("Why is the sky blue?", max_new_tokens=64).text)

Names are imported when first used, so that ``import specinfer`` does not wait for torch and transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specinfer.common import display, versions
from specinfer.errors import SpecinferError

if TYPE_CHECKING:
    from specinfer.adaptive.policy import Auto
    from specinfer.attention import ModelCheck, check_model
    from specinfer.batch import generate_files, read_prompts
    from specinfer.decoder import SpeculativeDecoder
    from specinfer.drafts.head import HeadDraft
    from specinfer.drafts.language_model import ModelDraft
    from specinfer.drafts.lookahead import LookaheadDraft
    from specinfer.drafts.memory import Memory
    from specinfer.drafts.ngram import NGramDraft
    from specinfer.drafts.recycling import RecyclingDraft
    from specinfer.drafts.suffix import SuffixDraft
    from specinfer.engine.draft import Draft
    from specinfer.engine.generation import Run
    from specinfer.engine.many import Finished
    from specinfer.engine.scoring import Score
    from specinfer.engine.target_view import verify_tree
    from specinfer.engine.text_stream import TextStream
    from specinfer.engine.verify import ExactMatch, MultiStep, Verdict, Verifier
    from specinfer.evaluation.certification import Certificate, certify, certify_verifier
    from specinfer.evaluation.compare import Comparison, compare
    from specinfer.evaluation.doctor import DraftReport, check_draft
    from specinfer.evaluation.traces import PaperTables, Replay, Trace, paper_tables, record, replay
    from specinfer.integrations.transformers import custom_generate
    from specinfer.results import Result, Stats, Step
    from specinfer.tree import BestFirst, Chain, Expansion, Sampled, TokenTree, merge
    from specinfer.viz.inspection import Inspection, StepInspection, inspect
    from specinfer.viz.live import watch

__version__ = versions.VERSION

_HOME = {
    "adaptive.policy": "Auto",
    "attention": "ModelCheck check_model",
    "batch": "generate_files read_prompts",
    "decoder": "SpeculativeDecoder",
    "engine.draft": "Draft",
    "drafts.head": "HeadDraft",
    "drafts.language_model": "ModelDraft",
    "drafts.lookahead": "LookaheadDraft",
    "drafts.memory": "Memory",
    "drafts.ngram": "NGramDraft",
    "drafts.recycling": "RecyclingDraft",
    "drafts.suffix": "SuffixDraft",
    "engine.generation": "Run",
    "engine.many": "Finished",
    "engine.scoring": "Score",
    "engine.target_view": "verify_tree",
    "engine.text_stream": "TextStream",
    "engine.verify": "ExactMatch MultiStep Verdict Verifier",
    "evaluation.certification": "Certificate certify certify_verifier",
    "evaluation.compare": "Comparison compare",
    "evaluation.doctor": "DraftReport check_draft",
    "evaluation.traces": "PaperTables Replay Trace paper_tables record replay",
    "integrations.transformers": "custom_generate",
    "results": "Result Stats Step",
    "tree": "BestFirst Chain Expansion Sampled TokenTree merge",
    "viz.inspection": "Inspection StepInspection inspect",
    "viz.live": "watch",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [
    "Auto",
    "BestFirst",
    "Certificate",
    "Chain",
    "Comparison",
    "Draft",
    "DraftReport",
    "ExactMatch",
    "Expansion",
    "Finished",
    "HeadDraft",
    "Inspection",
    "LookaheadDraft",
    "Memory",
    "ModelCheck",
    "ModelDraft",
    "MultiStep",
    "NGramDraft",
    "PaperTables",
    "RecyclingDraft",
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
    "SuffixDraft",
    "TextStream",
    "TokenTree",
    "Trace",
    "Verdict",
    "Verifier",
    "certify",
    "certify_verifier",
    "check_draft",
    "check_model",
    "compare",
    "custom_generate",
    "generate_files",
    "inspect",
    "merge",
    "paper_tables",
    "read_prompts",
    "record",
    "replay",
    "verify_tree",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'specinfer' has no attribute {name!r}")
    value = getattr(import_module(f"specinfer.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


display.register(lambda name: getattr(import_module("specinfer.viz"), name))


def __dir__() -> list[str]:
    return __all__
