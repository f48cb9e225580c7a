"""Requests that come and go at random, for tests of what serves them."""

from collections.abc import Sequence
from random import Random
from typing import Any

from specinfer.engine.requests import Request
from specinfer.engine.scheduler import Scheduler


def run_at_random(
    scheduler: Scheduler, texts: Sequence[Any], random: Random, most: int
) -> list[tuple[Request, int, dict[str, Any]]]:
    """Decode one to four requests, added and aborted at any step; return each with its text's number and its options.

    Args:
        scheduler: idle.
        texts: to choose prompts from.
        random: the chance.
        most: new tokens of a request.
    """
    asked: list[tuple[Request, int, dict[str, Any]]] = []
    left = random.randint(1, 4)
    while left or not scheduler.idle:
        while left and random.random() < 0.6:
            number, temperature, new = random.randrange(len(texts)), random.choice([0, 1]), random.randint(1, most)
            options = {"temperature": temperature, "seed": number, "max_new_tokens": new}
            asked.append((scheduler.add(scheduler.decoder.prepare(texts[number], **options)), number, options))
            left -= 1
        if asked and random.random() < 0.1:
            scheduler.abort(random.choice(asked)[0])
        scheduler.step()
    return asked
