# %% [markdown]
# # 3. Tree against sequence
#
# Does branching pay? Measure it on your own prompts; then record once, and answer further questions without a model.
#
# ## Compare
#
# Every method on every prompt, interleaved. Tree and sequence have the same drafts, and as many levels.

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
# How to read it: *tokens/pass* counts what one target pass commits, the target's own token included. *x autoregressive*
# is the ratio of tokens/s, on the machine that ran this. *Overhead* is what a step costs beyond a plain one. In
# bfloat16, near-ties may end *same ids*; *largest gap* is how far apart, in logits, the two tokens were.

# %%
ax = comparison.plot()

# %% [markdown]
# ## Record once
#
# A trace keeps the target's texts, and what the drafts would have proposed at every place of them.

# %%
from specinfer import SpeculativeDecoder, record

decoder = SpeculativeDecoder.from_pretrained()
trace = record(decoder, prompts, max_new_tokens=40, nodes=32, depth=8, top=8)
trace

# %% [markdown]
# ## Replay
#
# Chains of any length, expansions <1, 1, k, 1, ...>, best-first trees of any budget, here with one of the two
# drafts. No model runs: the text does not depend on the tree, so these are the passes that a run would take.

# %%
import matplotlib.pyplot as plt

from specinfer import BestFirst, Chain, Expansion, replay
from specinfer.evaluation.traces import oracle

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
# And whether its probabilities mean what they say, which is what best-first ranks by:

# %%
ax = plot_calibration([calibration(trace, draft.name) for draft in decoder.drafts])

# %% [markdown]
# ## Sampling: which rule accepts most?
#
# At temperature 1, five children at the third level, as in SpecInfer's Table 3. Sampled trees would have led to other
# texts, so their figures are expectations given this one; each line says which it is.

# %%
from specinfer import ExactMatch, MultiStep, Sampled

sampled = record(decoder, prompts, max_new_tokens=40, temperature=1.0, nodes=0, depth=8, top=8)
expansion = (1, 1, 5, 1, 1, 1, 1, 1)
rules = [
    (Sampled(expansion, replacement=True), ExactMatch()),  # naive
    (Sampled(expansion, replacement=True), MultiStep(replacement=True)),
    (Sampled(expansion), MultiStep()),
    (Expansion(expansion), ExactMatch()),  # coupled, the default
]
for policy, verifier in rules:
    print(replay(sampled, policy, verifier, drafts=[head]))

# %% [markdown]
# Four prompts are a taste, not a measurement: the intervals above say how little they prove. `specinfer compare`,
# `record`, `replay` and `paper-tables` do the same for whole sets, and go on where they were killed.
#
# Next: why [sampling stays lossless](4_lossless_sampling.ipynb).
