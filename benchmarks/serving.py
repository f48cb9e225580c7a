"""Servers under load: texts of some clients at once, streamed, from several servers in turns.

    specinfer serve --port 8001 &
    specinfer serve --port 8002 --tree none &
    python benchmarks/serving.py --prompts prompts/chat.jsonl prompts/code.jsonl --clients 1 4 16
        --server auto=http://127.0.0.1:8001/v1 --server plain=http://127.0.0.1:8002/v1

Any server of OpenAI's protocol is measured alike.  Each client asks for its next text when one has ended.  Per server
and number of clients: tokens a second of all texts, and the median and the 99th percentile of the time to the first
token and of the time between two events of a stream, which may bring several tokens.  It needs the `openai` package.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
from common import read_prompts
from openai import OpenAI


class Stream(NamedTuple):
    """One text: when it was asked for, when each event with text came, and its tokens."""

    asked: float
    events: list[float]
    tokens: int


def stream(client: OpenAI, model: str, prompt: str, new_tokens: int) -> Stream:
    """Ask for a text, and read it to its end."""
    asked, events, tokens = perf_counter(), [], 0
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=new_tokens,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.choices and chunk.choices[0].delta.content:
            events.append(perf_counter())
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return Stream(asked, events, tokens or len(events))


def load(url: str, prompts: list[str], clients: int, new_tokens: int) -> list[Stream]:
    """Return the texts of all prompts, so many at a time."""
    client = OpenAI(base_url=url, api_key="none", timeout=600)
    model = client.models.list().data[0].id
    with ThreadPoolExecutor(clients) as pool:
        return [*pool.map(lambda prompt: stream(client, model, prompt, new_tokens), prompts)]


def figures(streams: list[Stream]) -> list[float]:
    """Return tokens a second, then milliseconds: to the first token, and between events, median and 99th percentile."""
    streams = [each for each in streams if each.events]  # the others are empty texts
    seconds = max(each.events[-1] for each in streams) - min(each.asked for each in streams)
    first = [1e3 * (each.events[0] - each.asked) for each in streams]
    between = [1e3 * (later - earlier) for each in streams for earlier, later in pairwise(each.events)]
    rate = sum(each.tokens for each in streams) / seconds
    return [rate, *np.percentile(first, [50, 99]), *np.percentile(between, [50, 99])]


def main() -> None:
    """Measure all servers in turns, and print a line for each and each number of clients."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", nargs="+", type=Path, required=True, help='JSON lines with "prompt" and "split"')
    p.add_argument("--count", type=int, default=16, help="prompts in all, split evenly between the files")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--server", action="append", required=True, help="name=URL")
    p.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16])
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    servers = [server.partition("=")[::2] for server in args.server]
    prompts = read_prompts(args.prompts, args.count)
    print("clients server      tokens/s   first token ms, p50  p99   between events ms, p50  p99")
    for clients in args.clients:
        found: dict[str, list[list[float]]] = {name: [] for name, _ in servers}
        for number in range(args.rounds):
            order = servers if number % 2 else servers[::-1]
            for name, url in order:
                # a prompt is asked for once, or a store of prefixes would know it
                mine = [f"{number} {clients}: {prompt}" for prompt in prompts]
                found[name].append(figures(load(url, mine, clients, args.max_new_tokens)))
        for name, rounds in found.items():
            rate, *times = np.median(rounds, 0)
            print(
                f"{clients:7} {name:10} {rate:9.1f} {times[0]:19.0f} {times[1]:7.0f} {times[2]:20.0f} {times[3]:7.0f}"
            )


if __name__ == "__main__":
    main()
