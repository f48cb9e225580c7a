"""Servers under load: texts of some clients at once, streamed, from several servers in turns.

    python benchmarks/serving.py --prompts prompts/chat.jsonl prompts/code.jsonl --clients 1 4 16
        --start "auto=python -m specinfer serve --port PORT" --server other=http://127.0.0.1:8002/v1 [--json]

Any server of OpenAI's protocol is measured alike: one that runs, or one that is started with its command, in which PORT
stands for a free port, and ended.  Each client asks for its next text when one has ended, four at least.  Per server
and number of clients: tokens a second of all texts, and the median and the 99th percentile of the time to the first
token and of the time between two events of a stream, which may bring several tokens.  It needs the `openai` package.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice, pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np
from common import free_port, print_rows, read_prompts
from openai import APIConnectionError, InternalServerError, OpenAI

EACH = 4  # texts of a client, at least: with fewer most of the time passes as they come and go


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
    """Return the texts of all prompts; a few clients ask for them at a time."""
    client = OpenAI(base_url=url, api_key="none", timeout=600)
    model = client.models.list().data[0].id
    with ThreadPoolExecutor(clients) as pool:
        return [*pool.map(lambda prompt: stream(client, model, prompt, new_tokens), prompts)]


@contextmanager
def started(command: str) -> Iterator[str]:
    """Start a server, yield its address when it answers, and end it."""
    port = str(free_port())
    words = [sys.executable if word == "python" else word for word in shlex.split(command.replace("PORT", port))]
    url = f"http://127.0.0.1:{port}/v1"
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            client = OpenAI(base_url=url, api_key="none", max_retries=0)
            while process.poll() is None:
                try:
                    client.models.list()
                    break
                except (APIConnectionError, InternalServerError):  # it does not listen yet, or reads its model
                    sleep(0.5)
            else:
                raise SystemExit(f"the server ended before it answered: {command}")
            yield url
        finally:
            process.terminate()


def figures(streams: list[Stream]) -> list[float]:
    """Return tokens a second, then milliseconds: to the first token, and between events, median and 99th percentile."""
    streams = [each for each in streams if each.events]  # the others are empty texts
    seconds = max(each.events[-1] for each in streams) - min(each.asked for each in streams)
    first = [1e3 * (each.events[0] - each.asked) for each in streams]
    between = [1e3 * (later - earlier) for each in streams for earlier, later in pairwise(each.events)]
    rate = sum(each.tokens for each in streams) / seconds
    return [rate, *np.percentile(first, [50, 99]), *np.percentile(between, [50, 99])]


def main() -> None:
    """Start servers, measure all in turns, and print a line for each and each number of clients."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--prompts", nargs="+", type=Path, required=True, help='JSON lines with "prompt" and "split"')
    p.add_argument("--count", type=int, default=16, help="prompts, split evenly between the files")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--server", action="append", default=[], help="name=URL")
    p.add_argument("--start", action="append", default=[], help="name=command, with PORT in it")
    p.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--json", action="store_true", help="print a JSON object a row in place of the table")
    args = p.parse_args()
    servers = [server.partition("=")[::2] for server in args.server]
    if not args.json:
        print("clients server     tokens/s  first token ms, p50, p99  between events ms, p50, p99")
    with ExitStack() as stack:
        for name, _, command in (server.partition("=") for server in args.start):
            servers.append((name, stack.enter_context(started(command))))
        for row in measured(servers, args):
            print_rows([row]) if args.json else print(" ".join(f"{value:>10}" for value in row.values()))


def measured(servers: list[tuple[str, str]], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the medians of the rounds, for each server and number of clients."""
    known = read_prompts(args.prompts, args.count)
    for clients in args.clients:
        prompts = [*islice(cycle(known), max(args.count, EACH * clients))]
        found: dict[str, list[list[float]]] = {name: [] for name, _ in servers}
        for number in range(args.rounds):
            order = servers if number % 2 else servers[::-1]
            for name, url in order:
                # a prompt is asked for once, or a store of prefixes would know it
                mine = [f"{number} {clients} {index}: {prompt}" for index, prompt in enumerate(prompts)]
                found[name].append(figures(load(url, mine, clients, args.max_new_tokens)))
        for name, rounds in found.items():
            rate, *times = np.median(rounds, 0).tolist()
            rounded = dict(zip(("first", "first p99", "between", "between p99"), map(round, times), strict=True))
            yield {"clients": clients, "server": name, "tokens/s": round(rate, 1), **rounded}


if __name__ == "__main__":
    main()
