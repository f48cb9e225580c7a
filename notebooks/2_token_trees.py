# %% [markdown]
# # 2. Token trees
#
# Grow a tree by hand, merge two trees, draw them, see the mask; then examine a real step in the debugger.
#
# ## From a made-up draft
#
# A growth policy knows distributions, not models. Here is a draft with a vocabulary of six words: it says which word
# may follow which.

# %%
import torch

from specinfer import BestFirst, Chain, Expansion
from specinfer.tree import DenseSource, Forest, merge
from specinfer.viz import text

words = ["the", "cat", "dog", "sat", "ran", "away"]


class Words:
    """All that drawing needs of a tokenizer."""

    def convert_ids_to_tokens(self, token):
        return words[token]

    def decode(self, ids):
        return " ".join(words[token] for token in ids)


def draft(number, follows):
    """A source for growth policies: the probabilities of the next word, given the last one."""
    table = torch.tensor([[follows[word].get(after, 0.0) for after in words] for word in words])
    return DenseSource(lambda level: table[level.tokens.clamp(min=0)].log(), batch=1, draft=number)


first = draft(
    0,
    {
        "the": {"cat": 0.6, "dog": 0.4},
        "cat": {"sat": 0.7, "ran": 0.3},
        "dog": {"ran": 0.8, "sat": 0.2},
        "sat": {"the": 0.9, "away": 0.1},
        "ran": {"away": 0.9, "the": 0.1},
        "away": {"the": 1.0},
    },
)


def grow(policy, source):
    return policy.grow(source).trees([words.index("the")], source.draft)[0]


tree = grow(BestFirst(max_nodes=7, max_depth=4), first)
print(text(tree, tokenizer=Words()))

# %% [markdown]
# `BestFirst` finds the likeliest *paths*: it includes "the dog ran away" and not "the cat ran". Three policies, each
# with the likeliest sibling on top:

# %%
import matplotlib.pyplot as plt

from specinfer.viz.plots import plot_mask, plot_tree

policies = [Chain(4), Expansion((2, 2, 1)), BestFirst(7, 4)]
figure, axes = plt.subplots(3, 1, figsize=(6.5, 4.5), height_ratios=(1, 4, 2), layout="constrained")
for ax, policy in zip(axes, policies, strict=True):
    plot_tree(grow(policy, first), Words(), ax=ax).set_title(str(policy), loc="left", fontsize="medium")
    ax.set_xlabel("")

# %% [markdown]
# ## Two drafts, one tree
#
# A second draft has other probabilities. `merge` takes the union of the trees and keeps which draft proposed what;
# `fit` cuts it to one budget.

# %%
second = draft(
    1,
    {
        "the": {"dog": 0.9, "cat": 0.1},
        "cat": {"sat": 1.0},
        "dog": {"sat": 0.6, "ran": 0.4},
        "sat": {"the": 0.5, "away": 0.5},
        "ran": {"away": 1.0},
        "away": {"the": 1.0},
    },
)
policy = BestFirst(7, 4)
merged = merge([tree, grow(policy, second)])
(cut,) = policy.fit(Forest.of([merged]))
print(f"7 nodes and 7 nodes are {merged.num_drafted} together, of which {cut.num_drafted} are kept")
ax = plot_tree(cut, Words(), drafts=["first", "second"])

# %% [markdown]
# ## The mask
#
# The target reads all nodes in one pass. Each node attends to the committed text, its ancestors and itself, as if it
# were alone.

# %%
ax = plot_mask(cut, Words(), prefix=12)

# %% [markdown]
# ## A real step
#
# The same with a model. Its drafts are a head that reads the target's hidden states, and n-grams of the text so far.

# %%
from specinfer import SpeculativeDecoder, inspect

decoder = SpeculativeDecoder.from_pretrained(dtype="float32", tree=BestFirst(max_nodes=12, max_depth=6))
result = decoder.generate(
    "List five fruits. Then list the same five fruits again, in reverse order.", max_new_tokens=32
)
print(result.text)

# %%
inspection = inspect(decoder, result)
print(inspection)

# %% [markdown]
# `inspect` runs the target again, one pass a step, and keeps its probabilities at every node. Take one step.

# %%
number = max(range(len(inspection.steps)), key=lambda i: len(result.steps[i].path))
step = inspection.step(number)
ax = plot_tree(step)

# %%
ax = plot_mask(step)

# %% [markdown]
# ## The debugger: what if?
#
# Why was a node rejected? What would another tree have gained in this step? Each question costs one target pass.

# %%
rejected = next(node.node for node in step.nodes if node.state == "rejected")
print(f"node {rejected}:", step.why(rejected))
print()
print(step.compare(step.with_budget(3)))

# %% [markdown]
# Without the accepted path the step gains nothing. Put the same words back by hand, and it gains them again.

# %%
path = step.tree.path(step.path[-1])
without = step.without(step.path[0])
by_hand = without.with_branch(0, path)
print(without.compare(by_hand))
ax = plot_tree(by_hand)

# %% [markdown]
# Another policy grows its tree in the same step, with the decoder's drafts.

# %%
print(step.compare(step.with_policy(Chain(6))))
print(step.compare(step.with_policy(Expansion((3, 2, 1, 1)))))

# %% [markdown]
# A notebook displays an inspection, too: point at a node for the draft's and the target's probability, its position and
# its cache slot. On GitHub, where no scripts run, you see the tokens.

# %%
step

# %% [markdown]
# Next: [tree against sequence](3_tree_against_sequence.ipynb), in figures.
