# %% [markdown]
# # 4. Lossless sampling
#
# Speculation must not change what the target writes. For greedy text that is easy: accept what the target would have
# written. For sampled text it depends on the rule *and* on the tree, and a wrong pair biases the output silently.
#
# ## Coupled to the seed, the default
#
# The noise is a function of seed, position and token, so the target's choice at every node is a fixed token. The tree
# only predicts it: another tree takes other passes to the same text.

# %%
from specinfer import BestFirst, Expansion, Sampled, SpeculativeDecoder
from specinfer.engine.verify import MultiStep
from specinfer.errors import PairingError

decoder = SpeculativeDecoder.from_pretrained(dtype="float32", tree=None)


def with_tree(tree):
    """The same target and drafts with another tree."""
    return SpeculativeDecoder(decoder.target.model, decoder.tokenizer, tree=tree)


prompt = "Tell me about a lighthouse in one sentence."
options = {"max_new_tokens": 28, "temperature": 0.8, "seed": 3}
for tree in (None, BestFirst(8, 4), Expansion((3, 2, 1))):
    result = with_tree(tree).generate(prompt, **options)
    print(f"{result.stats.target_passes:2} passes, {tree}:\n  {result.text}")

# %% [markdown]
# ## Multi-step speculative sampling
#
# SpecInfer draws children from the draft's distribution q, and accepts each with a certain probability. The output
# distribution is the target's, too, but the text depends on the tree.

# %%
for tree in (Sampled((2, 2, 1)), Sampled((1, 1, 1))):
    sampling = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, drafts="bundled", tree=tree)
    result = sampling.generate(prompt, **options)
    print(f"{result.stats.target_passes:2} passes, {tree}:\n  {result.text}")

# %% [markdown]
# With coupled sampling a seed gives one text. Multi-step sampling gives two texts, each as likely as it should be.
#
# ## Certificates
#
# A few texts do not show that a distribution is unchanged. So it is enumerated: every outcome of every draw and coin,
# on a made-up target and draft with four tokens, with the same policies and verifiers that the engine runs. Zero means
# zero.

# %%
from specinfer import certify
from specinfer.engine.verify import ExactMatch
from specinfer.evaluation.certification import Pair, likeliest

pairs = {
    "best-first, exact match": Pair(BestFirst(5, 3), ExactMatch()),
    "drawn with replacement, multi-step": Pair(Sampled((2,), replacement=True), MultiStep(replacement=True)),
    "drawn without, multi-step renormalised": Pair(Sampled((2,)), MultiStep()),
    "drawn without, not renormalised": Pair(Sampled((2,)), MultiStep(replacement=True)),
    "the likeliest two, tested as if drawn": Pair(Sampled((2,)), MultiStep(), (likeliest,)),
}
for name, certificate in zip(pairs, certify(pairs.values()), strict=True):
    verdict = "lossless" if certificate.lossless else "biased"
    print(f"{name:40} total variation {certificate.total_variation:.4f}  {verdict}")

# %% [markdown]
# ## What a wrong pair does to the text
#
# The last line is a mistake of published code: it takes the draft's likeliest tokens, and tests them with the rule for
# drawn tokens. How often each of the four tokens then comes first:

# %%
import matplotlib.pyplot as plt
import numpy as np

from specinfer.evaluation.certification import RandomModels, output_distribution, target_distribution

models = RandomModels(vocabulary=4, seed=0)
right, wrong = pairs["drawn without, multi-step renormalised"], pairs["the likeliest two, tested as if drawn"]
first = {
    "the target's distribution": target_distribution(right, models, tokens=2).sum(1),
    "drawn children": output_distribution(right, models, tokens=2).sum(1),
    "the likeliest two, same rule": output_distribution(wrong, models, tokens=2).sum(1),
}
figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
styles = (("#E6E6E6", ""), ("#009E73", "///"), ("#D55E00", "xx"))
for i, ((name, distribution), (colour, hatch)) in enumerate(zip(first.items(), styles, strict=True)):
    ax.bar(np.arange(4) + 0.27 * (i - 1), distribution, 0.27, label=name, color=colour, hatch=hatch, ec="black", lw=0.6)
ax.set(xlabel="token", ylabel="probability of coming first", xticks=range(4))
legend = ax.legend(frameon=False)

# %% [markdown]
# Two tokens never come first. Other mistakes, by their distance from the target's distribution; `specinfer certify`
# knows more of them.

# %%
from specinfer.evaluation import certification as known
from specinfer.evaluation.certification import Choices

once, two, three, chain = Sampled((1,), replacement=True), Sampled((2,)), Sampled((3,)), Sampled((1, 1))
mistakes = {
    "the same noise at every position": Pair(Expansion((2, 2)), ExactMatch(), (known.favours,), Choices.REUSED),
    "the likeliest two, tested as if drawn": wrong,
    "three drawn, the likeliest two kept": Pair(three, MultiStep(), edit=known.likeliest_two_kept),
    "two drafts, one mean q": Pair(
        once, MultiStep(replacement=True), (known.honest,) * 2, edit=known.mean_q_for_all_drafts
    ),
    "bonus token from p after a rejection": Pair(chain, known.NoResidual()),
    "drawn at another temperature than q says": Pair(chain, MultiStep(), (known.sharpened,)),
    "unlikely draws dropped": Pair(Sampled((1,)), MultiStep(), edit=known.unlikely_dropped),
    "draws tried likeliest first": Pair(two, MultiStep(), edit=known.tried_likeliest_first),
    "q not renormalised": pairs["drawn without, not renormalised"],
    "duplicates tried once": Pair(
        Sampled((2,), replacement=True), MultiStep(replacement=True), edit=known.duplicates_tried_once
    ),
}
figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
distances = [certificate.total_variation for certificate in certify(mistakes.values())]
ax.barh(list(mistakes), distances, color="#D55E00", ec="black", lw=0.6)
ax.bar_label(ax.containers[0], fmt="{:.2f}", padding=3)
ax.invert_yaxis()
ax.set_xlim(0, 0.7)
text = ax.set_xlabel("total variation distance from the target's distribution")

# %% [markdown]
# So a wrong pair is an error when the decoder is built, not a bias of the text.

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
from specinfer.engine.verify import Verdict
from specinfer.evaluation.certification import certify_verifier


class AcceptLikely:
    """Accepts a drafted token if the target finds it likely, which sounds harmless."""

    def verify(self, tree, target):
        for child in tree.children(0):
            if target.distribution(0)[tree.tokens[child]] > 0.3:
                return Verdict((child,), target.draw(target.distribution(child)))
        return Verdict((), target.draw(target.distribution(0)))


print(certify_verifier(AcceptLikely(), BestFirst(3, 2)).total_variation)

# %% [markdown]
# Next: [your own draft](5_your_own_draft.ipynb).
