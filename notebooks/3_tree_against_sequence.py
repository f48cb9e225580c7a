# %% [markdown]
# # 3. Tree against sequence
#
# Does branching pay? Measure it on your own prompts. Then record once, and answer further questions without a model.
#
# ## Compare
#
# Every method runs on every prompt, and they take turns. Tree and sequence have the same drafts and as many levels.

# %%
from specinfer import compare

prompts = [
    "Name the days of the week, then name them again in reverse order.",
    "Write a Python function that returns the larger of two numbers, then one that returns the smaller.",
    "Why do cats purr? Answer in two sentences.",
    "Write an email to a friend about a walk by the sea.",
]
comparison = compare(prompts, methods=["autoregressive", "sequence", "tree", "prompt-lookup"], max_new_tokens=40)
print(comparison)

# %% [markdown]
# How to read it: *tokens/pass* counts the tokens that one target pass commits, the target's own token included. *x
# autoregressive* is the ratio of tokens/s, on the machine that ran this. *Overhead* is what a step costs beyond a step
# without a tree. In bfloat16 near-ties may make ids differ (*same ids*); *gap* says how far apart the logits
# of the two tokens were.

# %%
ax = comparison.plot()

# %% [markdown]
# ## Record once
#
# A trace keeps the target's texts, and what the drafts would have proposed at every position of them.

# %%
from specinfer import SpeculativeDecoder
from specinfer.evaluation.traces import record

decoder = SpeculativeDecoder.from_pretrained()
trace = record(decoder, prompts, max_new_tokens=40, nodes=32, depth=8, top=8)
trace

# %% [markdown]
# ## Replay
#
# Chains of any length, expansions <1, 1, k, 1, ...> and best-first trees of any budget, here with one of the two
# drafts. No model runs: the text does not depend on the tree, so a run would take the same number of passes.

# %%
import matplotlib.pyplot as plt

from specinfer import BestFirst, Chain, Expansion
from specinfer.evaluation.traces import oracle, replay

families = {
    "chain": [Chain(g) for g in (1, 2, 3, 4, 6, 8)],
    "expansion <1, 1, k, 1, ...>": [Expansion((1, 1, k, 1, 1, 1, 1, 1)) for k in (1, 2, 3, 4, 5)],
    "best-first": [BestFirst(n, 8) for n in (1, 2, 4, 8, 16, 32)],
}
head = decoder.drafts[0].name
figure, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
for (name, policies), style in zip(families.items(), ("s--", "^:", "o-"), strict=True):
    values = [replay(trace, policy, drafts=[head]).tokens_per_pass[0] for policy in policies]
    ax.plot([policy.max_nodes for policy in policies], values, style, label=name)
bound = oracle(trace, BestFirst(32, 8), drafts=[head]).tokens_per_pass[0]
ax.axhline(bound, color="gray", lw=1, label="oracle: the right path, if it was among the candidates")
ax.set(xscale="log", xlabel="drafted nodes", ylabel="tokens per target pass", ylim=(1, None))
ax.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
ax.minorticks_off()
legend = ax.legend(frameon=False, loc="center left", bbox_to_anchor=(0.02, 0.72))

# %% [markdown]
# ## What the drafts know
#
# How often the target's token was a draft's first, second, ... choice, by depth:

# %%
from specinfer.evaluation.traces import calibration, hits
from specinfer.viz.plots import plot_acceptance, plot_calibration

ax = plot_acceptance(hits(trace, head))

# %% [markdown]
# And whether its probabilities are calibrated: best-first trees rank by them.

# %%
ax = plot_calibration([calibration(trace, draft.name) for draft in decoder.drafts])

# %% [markdown]
# ## Sampling: which rule accepts most?
#
# At temperature 1, with five children at the third level, as in SpecInfer's Table 3. Sampled trees would have led to
# other texts, so their figures are expectations given this text; each line says which kind it is.

# %%
from specinfer import Sampled
from specinfer.engine.verify import ExactMatch, MultiStep

sampled = record(decoder, prompts, max_new_tokens=40, temperature=1.0, nodes=0, depth=8, top=8)
expansion = (1, 1, 5, 1, 1, 1, 1, 1)
rules = {
    "drawn, exact match": (Sampled(expansion, replacement=True), ExactMatch()),  # naive
    "drawn, multi-step": (Sampled(expansion, replacement=True), MultiStep(replacement=True)),
    "without replacement, multi-step": (Sampled(expansion), MultiStep()),
    "coupled to the seed, the default": (Expansion(expansion), ExactMatch()),
}
print("tokens per target pass")
for name, (policy, verifier) in rules.items():
    found = replay(sampled, policy, verifier, drafts=[head])
    print("{:32}  {:.2f} [{:.2f}, {:.2f}]".format(name, *found.tokens_per_pass), f" {found.how}")

# %% [markdown]
# Four prompts are an example, not a measurement: the intervals above are wide. `specinfer compare`, `record`, `replay`
# and `paper-tables` do the same for whole sets, and resume if they are interrupted.
#
# Next: why [sampling stays lossless](4_lossless_sampling.ipynb).
