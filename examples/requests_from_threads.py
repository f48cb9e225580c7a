"""One scheduler for several threads: their texts share passes, and each is what it would be alone.

python examples/requests_from_threads.py
"""

from concurrent.futures import ThreadPoolExecutor

from specinfer import SpeculativeDecoder

PROMPTS = ["Name three colours.", "Count from one to ten.", "Name the days of the week."]

decoder = SpeculativeDecoder.from_pretrained()
scheduler = decoder.scheduler(max_rows=8)


def answer(prompt: str) -> str:
    """Stream a text; whoever iterates takes a step for all."""
    return "".join(decoder.stream(prompt, scheduler=scheduler, max_new_tokens=16, temperature=0))


with ThreadPoolExecutor(len(PROMPTS)) as threads:
    for prompt, text in zip(PROMPTS, threads.map(answer, PROMPTS), strict=True):
        print(f"{prompt} {text!r}")

# the same without threads: requests come, go and are taken back between steps
first, second = (scheduler.add(decoder.prepare(prompt, max_new_tokens=16, temperature=0)) for prompt in PROMPTS[:2])
scheduler.step()
scheduler.abort(second)
while not scheduler.idle:
    for request, step in scheduler.step():
        print(len(request.steps), step.tokens)
print(first.result.finish_reason, second.result.finish_reason)
