# %% [markdown]
# # 4. Lossless sampling
#
# Speculation must not change what the target writes. For greedy text that is easy: accept what the target would have
# said. For sampled text it depends on the rule *and* on the tree, and a wrong pair biases the output silently.
#
# ## Coupled to the seed, the default
#
# The noise is a function of seed, position and token, so the target's choice at every node is a fixed token. The tree
# only guesses it: another tree, other passes, the same text.

# %%
from specinfer import BestFirst, MultiStep, Sampled, SpeculativeDecoder, Widths
from specinfer.errors import PairingError

decoder = SpeculativeDecoder.from_pretrained(dtype="float32", tree=None)


def with_tree(tree):
    """The same target and drafts with another tree."""
    return SpeculativeDecoder(decoder.target.model, decoder.tokenizer, tree=tree)


prompt = "Tell me about a lighthouse in one sentence."
options = {"max_new_tokens": 28, "temperature": 0.8, "seed": 3}
for tree in (None, BestFirst(8, 4), Widths((3, 2, 1))):
    result = with_tree(tree).generate(prompt, **options)
    print(f"{result.stats.target_passes:2} passes, {tree}:\n  {result.text}")

# %% [markdown]
# ## Multi-step speculative sampling
#
# SpecInfer's way draws the children from the draft's law q and tosses a coin for each. The law is right as well, but the
# text depends on the tree.

# %%
for tree in (Sampled((2, 2, 1)), Sampled((1, 1, 1))):
    own = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, drafts="shipped", tree=tree)
    result = own.generate(prompt, **options)
    print(f"{result.stats.target_passes:2} passes, {tree}:\n  {result.text}")

# %% [markdown]
# The default gives the same text in each case above; multi-step sampling gives two texts, each as likely as it should be.
#
# ## Certificates
#
# That a law is unchanged cannot be seen in a few texts, so it is enumerated: every outcome of every draw and coin, on a
# made-up target and draft of four tokens, with the very policies and verifiers that the engine runs. Zero means zero.

# %%
from specinfer import Walk
from specinfer.certification import Pair, RandomModels, certify, likeliest, output_law, target_law

pairs = {
    "best-first, walk": Pair(BestFirst(5, 3), Walk()),
    "drawn with replacement, multi-step": Pair(Sampled((2,), replacement=True), MultiStep(replacement=True)),
    "drawn without, multi-step renormalised": Pair(Sampled((2,)), MultiStep()),
    "drawn without, not renormalised": Pair(Sampled((2,)), MultiStep(replacement=True)),
    "top 2, tested as if they were drawn": Pair(Sampled((2,)), MultiStep(), (likeliest,)),
}
for name, certificate in zip(pairs, certify(pairs.values()), strict=True):
    verdict = "lossless" if certificate.lossless else "biased"
    print(f"{name:40} total variation {certificate.total_variation:.4f}  {verdict}")

# %% [markdown]
# ## What a wrong pair does to the text
#
# The last line is a mistake that published code makes: take the draft's likeliest tokens, and test them with the rule
# for drawn ones. How often each token then comes first:

# %%
import matplotlib.pyplot as plt
import numpy as np

models, mixed = RandomModels(vocabulary=4, seed=0), pairs["top 2, tested as if they were drawn"]
right = pairs["drawn without, multi-step renormalised"]
laws = {
    "the target's law": target_law(right, models, 2).sum(1),
    "drawn children, multi-step": output_law(right, models, 2).sum(1),
    "top 2, the same rule": output_law(mixed, models, 2).sum(1),
}
figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
looks = (("#E6E6E6", ""), ("#009E73", "///"), ("#D55E00", "xx"))
for place, ((name, law), (colour, hatch)) in enumerate(zip(laws.items(), looks, strict=True)):
    ax.bar(np.arange(4) + 0.27 * (place - 1), law, 0.27, label=name, color=colour, hatch=hatch, ec="black", lw=0.6)
ax.set(xlabel="token", ylabel="probability of coming first", xticks=range(4))
legend = ax.legend(frameon=False)

# %% [markdown]
# And all mistakes that are known here, by how far they take the law away. `specinfer certify` prints the list.

# %%
from specinfer.certification import broken_pairs

mistakes = sorted(certify(broken_pairs()), key=lambda certificate: certificate.total_variation)
figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
names = [f"{c.tree} | {c.verifier}".replace("replacement=", "") for c in mistakes]
ax.barh(names, [c.total_variation for c in mistakes], color="#D55E00", ec="black", lw=0.6)
ax.set(xlabel="total variation distance from the target's law, over three tokens")
ax.tick_params(axis="y", labelsize=7)

# %% [markdown]
# So a wrong pair is an error when the decoder is built, not a bias in what it writes.

# %%
try:
    SpeculativeDecoder(decoder.target.model, decoder.tokenizer, tree=BestFirst(8, 4), verifier=MultiStep())
except PairingError as error:
    print(error)

# %% [markdown]
# ## A verifier of your own
#
# Anything with `verify(tree, target)` can be certified.

# %%
from specinfer import Chain, certify_verifier
from specinfer.verify import Verdict


class AcceptLikely:
    """Accepts a drafted token if the target finds it likely: it sounds harmless."""

    def verify(self, tree, target):
        for child in tree.children(0):
            if target.law(0)[tree.tokens[child]] > 0.3:
                return Verdict((child,), target.draw(target.law(child)))
        return Verdict((), target.draw(target.law(0)))


print(certify_verifier(AcceptLikely(), Chain(1)).total_variation)

# %% [markdown]
# Next: [your own draft](5_your_own_draft.ipynb).
