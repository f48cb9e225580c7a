"""How a token tree becomes one forward pass of an unmodified Hugging Face model, and back.

layout -> mask -> model (prefill, score, commit) -> cache; `check_model` says whether a model can do it exactly.
Knows token trees and models; does not know drafting, verification, sampling or text.
"""

from specinfer.attention.cache import TreeCache
from specinfer.attention.check import ModelCheck, check_model
from specinfer.attention.forward import autocast_as_now
from specinfer.attention.layout import Layout, lay_out_chains, lay_out_level
from specinfer.attention.model import TreeModel, TreeSession, resumed, running
from specinfer.attention.offload import device_of, embedded, is_dispatched, resident, value_of, weight_of
from specinfer.attention.verdicts import Support

__all__ = [
    "Layout",
    "ModelCheck",
    "Support",
    "TreeCache",
    "TreeModel",
    "TreeSession",
    "autocast_as_now",
    "check_model",
    "device_of",
    "embedded",
    "is_dispatched",
    "lay_out_chains",
    "lay_out_level",
    "resident",
    "resumed",
    "running",
    "value_of",
    "weight_of",
]
