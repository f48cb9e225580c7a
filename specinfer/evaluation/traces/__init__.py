"""Record once, answer many questions: traces of target and drafts along texts, and what verification makes of them.

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.evaluation.traces import record, replay
trace = record(SpeculativeDecoder.from_pretrained(), ["Count to ten, twice."], max_new_tokens=32)
for nodes in (4, 8, 16, 32):
    print(replay(trace, BestFirst(nodes, 8)))
"""

from specinfer.evaluation.traces.chain_costs import CostModel, Costs, cost_model, measured
from specinfer.evaluation.traces.edges import EdgeCalibration, edge_calibration
from specinfer.evaluation.traces.paper import PaperTables, paper_tables
from specinfer.evaluation.traces.recording import record
from specinfer.evaluation.traces.replaying import Replay, oracle, replay
from specinfer.evaluation.traces.statistics import CalibrationCurve, HitTable, calibration, hits
from specinfer.evaluation.traces.trace import Trace, TraceText

__all__ = [
    "CalibrationCurve",
    "CostModel",
    "Costs",
    "EdgeCalibration",
    "HitTable",
    "PaperTables",
    "Replay",
    "Trace",
    "TraceText",
    "calibration",
    "cost_model",
    "edge_calibration",
    "hits",
    "measured",
    "oracle",
    "paper_tables",
    "record",
    "replay",
]
