# %% [markdown]
# # 1. Quick start
#
# Small drafts grow a **token tree**. The target scores all of its nodes in **one** forward pass, and the tokens that it
# agrees with are kept. The text is the target's own. Two CPU cores run this notebook in a minute; `make notebooks` runs
# all six.

# %%
from specinfer import BestFirst, SpeculativeDecoder

decoder = SpeculativeDecoder.from_pretrained(dtype="float32", tree=BestFirst(max_nodes=16, max_depth=8))

# %% [markdown]
# `from_pretrained()` alone is the default: bfloat16 where the processor has it, and trees of the size that pays, which
# depends on the clock. Both are set here, so that you see what we saw, to the last token.
#
# ## Generate

# %%
result = decoder.generate("Name the days of the week, then name them again.", max_new_tokens=48)
print(result.text)
print()
print(f"{result.stats.new_tokens} tokens in {result.stats.target_passes} target passes")

# %% [markdown]
# The step to look at first. Each box is a token that a draft proposed; percentages are the draft's. One target pass
# accepted the path in bold and added a token of its own. `print(result.best_step)` draws the same in a terminal.

# %%
from specinfer.viz.plots import plot_tree

ax = plot_tree(result.best_step)

# %% [markdown]
# A notebook displays a result as a page: step through the rounds, point at nodes, see which draft proposed which token.
# That needs a script, so on GitHub you see the text only. `result.to_html("result.html")` writes the same page.

# %%
result

# %% [markdown]
# ## Stream

# %%
stream = decoder.stream("Why is the sky blue? Answer in two sentences.", max_new_tokens=40)
for piece in stream:
    print(piece, end="|")
print(f"\n\n{stream.result.stats.tokens_per_target_pass:.2f} tokens per target pass")

# %% [markdown]
# A bar ends a piece of the stream. The tokens that one step gains come together. In a notebook, `watch` shows the text
# and the newest tree as they come:

# %%
from specinfer.viz.live import watch

watched = watch(decoder, "Count from one to ten, then count from one to ten again.", max_new_tokens=48)

# %% [markdown]
# ## A batch
#
# Each row has its own length, tree and end, and its text is what it would be alone.

# %%
prompts = [
    "Say hello in French.",
    "List three fruits. Then list the same three fruits again.",
    "Write a Python function that adds two numbers, then one that subtracts them.",
]
batch = decoder.generate(prompts, max_new_tokens=32)
for prompt, row in zip(prompts, batch, strict=True):
    print(f"{row.stats.tokens_per_target_pass:.2f} tokens per pass  {row.text!r}")
    assert row.token_ids == decoder.generate(prompt, max_new_tokens=32).token_ids

# %% [markdown]
# ## The same text for a seed, with and without speculation
#
# Sampling is coupled to the seed. The tree does not affect the text, only the number of passes.

# %%
plain = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, tree=None)
for seed in range(3):
    options = {"max_new_tokens": 40, "temperature": 0.7, "seed": seed}
    fast, slow = (d.generate("Tell me about a lighthouse in one sentence.", **options) for d in (decoder, plain))
    assert fast.token_ids == slow.token_ids
    print(f"seed {seed}: {fast.stats.target_passes} passes instead of {slow.stats.target_passes}: {fast.text}")

# %% [markdown]
# ## Where the time went
#
# Step by step, on the machine that ran this notebook.

# %%
from specinfer.viz.plots import plot_timeline

ax = plot_timeline(result)

# %% [markdown]
# Next: [token trees](2_token_trees.ipynb), up close.
