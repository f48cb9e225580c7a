"""How much does branching gain?  No speculation, a chain and a tree, with the same drafts, on a few prompts.

python examples/tree_against_chain.py
"""

from specinfer import BestFirst, Chain, SpeculativeDecoder

PROMPTS = [
    "Name the days of the week, then name them again in reverse order.",
    "Write a Python function that returns the larger of two numbers, then one that returns the smaller.",
    "Repeat this sentence three times: the cat sat on the mat and looked at the moon.",
]

for tree in (None, Chain(8), BestFirst(max_nodes=16, max_depth=8, min_probability=0.05)):
    decoder = SpeculativeDecoder.from_pretrained(tree=tree)
    results = [decoder.generate(prompt, max_new_tokens=32, temperature=0) for prompt in PROMPTS]
    tokens = sum(result.stats.new_tokens for result in results)
    passes = sum(result.stats.target_passes for result in results)
    print(f"{tree!s:70} {tokens / passes:.2f} tokens per target pass")
