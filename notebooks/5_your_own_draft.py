# %% [markdown]
# # 5. Your own draft
#
# A draft is trained on what its target writes. This run is tiny, a minute instead of hours, so that you see every part
# of it: 32 texts, where the bundled heads saw over 20,000.
#
# ## Text

# %%
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from specinfer import SpeculativeDecoder
from specinfer.training import Recipe, TextSettings, TrainingSettings, distill, read_prompts

subjects = ["the sea", "a garden", "winter", "trains", "bread", "the moon", "honey bees", "old clocks"]
phrases = ["Tell me about {}.", "Write a short poem about {}.", "List five facts about {}.", "Ask me about {}."]
prompts = [phrase.format(subject) for subject in subjects for phrase in phrases]
held_out = [phrase.format(subject) for subject in ("mountains", "coffee") for phrase in phrases]

folder = TemporaryDirectory()
file = Path(folder.name, "prompts.jsonl")
file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
print(f"{len(prompts)} prompts to learn from, {len(held_out)} to measure on")

# %% [markdown]
# ## Distil one, boost-tune another
#
# The target continues the prompts and hands over its hidden states. The first head learns the target's distribution on
# this text. The second is tuned on what the first one misses: a token that the first one proposes weighs a fifth.

# %%
decoder = SpeculativeDecoder.from_pretrained(tree=None)
model, tokenizer = decoder.target.model, decoder.tokenizer
losses = {}


def watch(stage, done, total, figures):
    if "loss" in figures:
        losses.setdefault(stage, []).append(figures["loss"])


training = TrainingSettings(epochs=5, tokens_per_batch=1024, vocabulary=4000, unroll=2, held_out=0.1)
recipe = Recipe(drafts=2, text=TextSettings(new_tokens=48, temperatures=(0.0,)), training=training)
made = distill(model, tokenizer, read_prompts([file]), Path(folder.name, "drafts"), recipe, progress=watch)
print(f"{made['texts']} texts, {made['tokens']} tokens")

# %%
import matplotlib.pyplot as plt

figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
for (stage, values), style in zip(losses.items(), ("-", "--"), strict=True):
    ax.plot(range(1, len(values) + 1), values, style, label=stage)
ax.set(xlabel="step", ylabel="loss")
legend = ax.legend(frameon=False)

# %% [markdown]
# ## Measure it honestly
#
# On prompts that were not trained on, beside the bundled heads and n-grams. One trace holds all drafts; the lines are
# 95 % intervals.

# %%
from specinfer import BestFirst
from specinfer.drafts.head import HeadDraft
from specinfer.evaluation.traces import hits, record, replay

drafts = [HeadDraft.load(trained["folder"]) for trained in made["drafts"]]
measured = SpeculativeDecoder(model, tokenizer, drafts=[*drafts, "bundled", "ngram"])
names = [draft.name for draft in measured.drafts]
trace = record(measured, held_out, max_new_tokens=24, nodes=16, depth=4, top=5)
for name in names:
    print(f"{name:8} target's token among its first 1 to 5:", hits(trace, name).within[0].round(2))

# %%
choices = {
    "first": names[:1],
    "second": names[1:2],
    "both, merged": names[:2],
    "bundled": names[2:3],
    "n-grams": names[-1:],
    "all of them": names,
}
taus = {name: replay(trace, BestFirst(16, 4), drafts=chosen).tokens_per_pass for name, chosen in choices.items()}
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
values, low, high = zip(*taus.values(), strict=True)
ax.barh(list(taus), values, color="#56B4E9", ec="black", lw=0.6)
ax.hlines(range(len(taus)), low, high, color="black", lw=1)
ax.invert_yaxis()
ax.axvline(1, color="black", lw=0.8, ls="--")
text = ax.set_xlabel("tokens per target pass, trees of 16 nodes; 1 = no speculation")

# %% [markdown]
# Prompts like those of the training favour a draft, and two heads trained on the same text propose much the same. More
# text helps, of the kind that you will decode: `specinfer distill --prompts FILE --out DIR`, which can be resumed.
#
# With any drafts, the text is the target's:

# %%
trained = SpeculativeDecoder(model, tokenizer, drafts=drafts, tree=BestFirst(16, 4))
result = trained.generate(held_out[0], max_new_tokens=40)
print(f"{result.stats.target_passes} passes instead of {result.stats.new_tokens}: {result.text}")

# %% [markdown]
# Next: [a schema and a GGUF file](6_a_schema_and_a_gguf_file.ipynb).
