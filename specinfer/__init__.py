"""specinfer: tree-based speculative decoding for Hugging Face models, with the target's exact output distribution.

    from specinfer import SpeculativeDecoder
    decoder = SpeculativeDecoder.from_pretrained()
    print(decoder.generate("Why is the sky blue?", max_new_tokens=64).text)

Names are imported when first used, so that ``import specinfer`` does not wait for torch and transformers.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specinfer.common import versions
from specinfer.errors import SpecinferError as SpecinferError

if TYPE_CHECKING:  # for type checkers, which read no tables
    from specinfer.adaptive.policy import Auto as Auto
    from specinfer.attention import check_model as check_model
    from specinfer.decoder import SpeculativeDecoder as SpeculativeDecoder
    from specinfer.drafts.language_model import ModelDraft as ModelDraft
    from specinfer.drafts.lookup.memory import Memory as Memory
    from specinfer.engine.draft import Draft as Draft
    from specinfer.evaluation.certification import certify as certify
    from specinfer.evaluation.compare import compare as compare
    from specinfer.evaluation.doctor import check_draft as check_draft
    from specinfer.evaluation.inspect.inspection import inspect as inspect
    from specinfer.integrations.transformers import custom_generate as custom_generate
    from specinfer.results import Result as Result
    from specinfer.tree import BestFirst as BestFirst
    from specinfer.tree import Chain as Chain
    from specinfer.tree import Expansion as Expansion
    from specinfer.tree import Sampled as Sampled
    from specinfer.tree import TokenTree as TokenTree

__version__ = versions.VERSION

# What libraries read when they are loaded, unless the environment says otherwise.  oneDNN keeps a kernel for each
# number of states that it has multiplied, 1,024 by default.  GNU OpenMP lets a thread that waits run for milliseconds:
# where other programs run, the thread that it waits for gets no turn meanwhile, and passes take ten times as long.
for _name, _value in {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "GOMP_SPINCOUNT": "2000"}.items():
    os.environ.setdefault(_name, _value)

# by module, what `import specinfer` offers, and after the bar what to import from there
_PUBLIC = {
    "adaptive.policy": "Auto |",
    "attention": "check_model | ModelCheck",
    "batch": "| generate_files read_prompts",
    "decoder": "SpeculativeDecoder |",
    "drafts.head": "| HeadDraft",
    "drafts.language_model": "ModelDraft |",
    "drafts.lookup.lookahead": "| LookaheadDraft",
    "drafts.lookup.memory": "Memory |",
    "drafts.lookup.ngram": "| NGramDraft",
    "drafts.lookup.recycling": "| RecyclingDraft",
    "drafts.lookup.suffix": "| SuffixDraft",
    "engine.draft": "Draft |",
    "calls.many": "| Finished",
    "engine.requests": "| Request",
    "engine.scheduler": "| Scheduler",
    "engine.store": "| PrefixStore",
    "engine.options": "| Options UsualOptions GrammarOptions ChatOptions Inputs ConfigOptions",
    "calls.run": "| Run",
    "calls.scoring": "| Score",
    "calls.verifying": "| verify_tree",
    "calls.text_stream": "| TextStream",
    "engine.verify": "| ExactMatch MultiStep Verdict Verifier",
    "errors": "SpecinferError |",
    "evaluation.certification": "certify | Certificate certify_verifier",
    "evaluation.compare": "compare | Comparison",
    "evaluation.doctor": "check_draft | DraftReport",
    "evaluation.traces": "| PaperTables Replay Trace paper_tables record replay",
    "integrations.transformers": "custom_generate |",
    "results": "Result | Stats Step",
    "tree": "BestFirst Chain Expansion Sampled TokenTree | merge",
    "evaluation.inspect.inspection": "inspect | Inspection StepInspection",
    "viz.live": "| watch",
}
_HOME = {name: f"specinfer.{module}" for module, names in _PUBLIC.items() for name in names.split() if name != "|"}

__all__ = sorted(name for names in _PUBLIC.values() for name in names.partition("|")[0].split())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specinfer' has no attribute {name!r}")
    if name not in __all__:
        raise AttributeError(f"specinfer.{name} is {_HOME[name]}.{name}: import it from there")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
