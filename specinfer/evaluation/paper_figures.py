"""Figures of SpecInfer (arXiv 2305.09781v4), target LLaMA-7B, draft LLaMA-68M.

Temperature -> set -> figures, T = 0 greedy and T = 1 "stochastic".  Sets: alpaca; cp, chatbot prompts; webqa, web
questions; cip, chatbot instruction prompts; piqa.
"""

ALL = "all"  # the name of all sets of prompts together, in tables

# Table 1: the share of steps in which the target's choice is among the draft's k = 1 ... 5 likeliest (greedy), or in
# which verification accepts one of k (stochastic).
SPECINFER_TABLE_1 = {
    0.0: {
        "alpaca": (0.68, 0.77, 0.81, 0.84, 0.85),
        "cp": (0.69, 0.79, 0.83, 0.86, 0.87),
        "webqa": (0.62, 0.72, 0.77, 0.80, 0.82),
        "cip": (0.70, 0.81, 0.85, 0.88, 0.89),
        "piqa": (0.63, 0.75, 0.79, 0.83, 0.85),
    },
    1.0: {
        "alpaca": (0.54, 0.81, 0.91, 0.95, 0.97),
        "cp": (0.56, 0.82, 0.92, 0.95, 0.97),
        "webqa": (0.52, 0.80, 0.90, 0.94, 0.96),
        "cip": (0.57, 0.84, 0.92, 0.95, 0.97),
        "piqa": (0.55, 0.82, 0.91, 0.95, 0.97),
    },
}

# Table 2: tokens verified per step, tree widths 1 ... 5, speculation length 8.
SPECINFER_TABLE_2 = {
    0.0: {
        "alpaca": (2.95, 3.07, 3.21, 3.33, 3.43),
        "cp": (2.58, 3.24, 3.46, 3.59, 3.69),
        "webqa": (2.27, 2.69, 2.86, 2.98, 3.07),
        "cip": (2.73, 3.40, 3.62, 3.79, 3.91),
        "piqa": (2.18, 2.80, 2.97, 3.10, 3.21),
    },
    1.0: {
        "alpaca": (1.79, 2.11, 2.26, 2.32, 2.38),
        "cp": (1.69, 1.99, 2.15, 2.23, 2.28),
        "webqa": (1.64, 1.93, 2.08, 2.15, 2.21),
        "cip": (1.72, 2.05, 2.19, 2.28, 2.29),
        "piqa": (1.67, 1.93, 2.08, 2.15, 2.21),
    },
}

# Table 3: tokens verified per step by naive sampling and by multi-step speculative sampling, width 5, length 8, T = 1.
SPECINFER_TABLE_3 = {
    "alpaca": (1.87, 2.38),
    "cp": (1.80, 2.28),
    "webqa": (1.73, 2.21),
    "cip": (1.79, 2.29),
    "piqa": (1.73, 2.21),
}
