"""Generate for a dataset of prompts on a Ray cluster, or on this machine if there is none.

    pip install "specinfer[ray]" && python examples/ray_generate.py

For files: ``ray.data.read_json("prompts/questions.jsonl")`` in, ``texts.write_json("folder")`` out.
"""

import ray

from specinfer.integrations.ray import generate

PROMPTS = [
    "Name three colours, then name them again.",
    "Count to ten.",
    "Spell the word tree, twice.",
    "Why is grass green?",
]

ray.init(ignore_reinit_error=True)
dataset = ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS])
texts = generate(dataset, concurrency=1, num_cpus=2, max_new_tokens=24, temperature=0)
for row in texts.iter_rows():
    print(f"{row['prompt']}\n    {row['text']!r}, {row['target_passes']} target passes")
ray.shutdown()
