"""Batches of texts with the target's hidden states, read from shards.

Knows: the shard format, padding, shuffling.  Does not know: how texts were made (`text`), what is trained on them.

A shard is a safetensors file that holds texts one after the other: ``ids`` (N,), ``states`` (N, K, H), the target's K
hidden states that chose each token (zeros for a text's first token), and per text ``lengths`` and ``prompt_lengths``.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specinfer.errors import InputError

LONGEST = 1024  # tokens of a text; the rest is left out
LEAST_WINDOW = 256  # tokens that a head attends to
POOL = 50  # batches whose texts are sorted by length together, so that there is little padding


class TrainingText(NamedTuple):
    """Where one text is stored."""

    shard: int
    start: int  # token of the shard
    length: int
    prompt_length: int


class Batch(NamedTuple):
    """B texts padded to T tokens."""

    ids: Tensor  # (B, T) int64
    states: Tensor  # (B, T, K, H)
    learn: Tensor  # (B, T - 1) bool: token i + 1 was chosen by the target and is no padding


class Texts:
    """All texts of some shards, split into texts to train on and held-out texts.

    Args:
        shards: files as above.
        held_out: share of the texts that are kept for measuring; at least one text is.
        seed: of the split.

    Raises:
        InputError: fewer than two texts with tokens to learn.
    """

    def __init__(self, shards: Sequence[Path], held_out: float = 0.02, seed: int = 0) -> None:
        self.files = [safe_open(shard, "pt") for shard in shards]
        self.ids = [file.get_tensor("ids").long() for file in self.files]
        texts = []
        for number, file in enumerate(self.files):
            lengths, prompts = (file.get_tensor(name).tolist() for name in ("lengths", "prompt_lengths"))
            start = 0
            for length, prompt in zip(lengths, prompts, strict=True):
                texts.append(TrainingText(number, start, min(length, LONGEST), prompt))
                start += length
        texts = [text for text in texts if text.length > max(text.prompt_length, 1)]
        if len(texts) < 2:
            raise InputError(f"{len(texts)} texts to learn from, and one is held out: give at least 2")
        Random(seed).shuffle(texts)
        split = max(1, round(held_out * len(texts)))
        self.held_out, self.train = texts[:split], texts[split:]

    def counts(self, vocab_size: int) -> Tensor:
        """Return how often each token occurs in the texts to train on, (V,)."""
        tokens = torch.cat([self._ids(text)[text.prompt_length :] for text in self.train])
        return torch.bincount(tokens, minlength=vocab_size)

    @property
    def window(self) -> int:
        """Tokens that a head has learnt to attend to: a power of two, which nine in ten of the texts do not exceed."""
        lengths = sorted(text.length for text in self.train)
        return max(LEAST_WINDOW, 1 << (lengths[9 * len(lengths) // 10] - 1).bit_length())

    def batches(self, texts: Sequence[TrainingText], tokens: int, shuffle: Random | None) -> list[list[TrainingText]]:
        """Return batches of about ``tokens`` tokens, padding included; in random order with ``shuffle``."""
        order = list(texts)
        if shuffle:
            shuffle.shuffle(order)
        average = sum(text.length for text in order) // len(order)
        pool = max(1, POOL * tokens // average)
        batches: list[list[TrainingText]] = []
        for start in range(0, len(order), pool):
            batch: list[TrainingText] = []
            batches.append(batch)
            for text in sorted(order[start : start + pool], key=lambda text: text.length):
                if batch and text.length * (len(batch) + 1) > tokens:
                    batches.append(batch := [])
                batch.append(text)
        if shuffle:
            shuffle.shuffle(batches)
        return batches

    def load(self, texts: Sequence[TrainingText], device: str | torch.device = "cpu") -> Batch:
        """Read and pad one batch."""
        ids = [self._ids(text) for text in texts]
        states = [self.files[t.shard].get_slice("states")[t.start : t.start + t.length] for t in texts]
        learn = [torch.arange(1, t.length) >= t.prompt_length for t in texts]
        return Batch(*(pad_sequence(column, batch_first=True).to(device) for column in (ids, states, learn)))

    def _ids(self, text: TrainingText) -> Tensor:
        return self.ids[text.shard][text.start : text.start + text.length]


def endless(texts: Texts, tokens: int, seed: int, skip: int) -> Iterator[list[TrainingText]]:
    """Yield batches of one epoch after the other from batch number ``skip`` on; each epoch has its own random order."""
    for epoch in count():
        batches = texts.batches(texts.train, tokens, Random(f"{seed} {epoch}"))
        yield from batches[skip:]
        skip = max(0, skip - len(batches))
