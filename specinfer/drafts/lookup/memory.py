"""A memory of finished texts, from which later calls draft.

Knows: token ids, whose tokenizer they are of, bytes, a file.  Does not know: how occurrences become a draft.

A memory only proposes: the target's text is the same with any memory.  But drafts show what earlier texts were, and so
does speed.  So one memory is not for people who must not learn of each other's texts.
"""

import os
from collections.abc import Sequence

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedTokenizerBase

from specinfer.common.files import checked_path, write_whole
from specinfer.common.lock import Lock
from specinfer.drafts.lookup.text_index import BREAK, LENGTHS, MAX_CONTEXT, TextIndex, texts_of
from specinfer.errors import InputError, TokenizerMismatch, one_line
from specinfer.loading import tokenizer_fingerprint

FORMAT = "specinfer memory 1"
LEAST_BYTES = 1 << 16
KEPT = 0.75  # of the bytes allowed, when old texts are forgotten
ADVICE = "remove it, or name another file"


class Memory:
    """Texts of earlier rows and calls, prompts included, and an index of their n-grams.

    Threads may share it.

    Args:
        max_bytes: size in memory, about; beyond it the oldest texts are forgotten.  A token takes some 500 bytes.

    Attributes:
        index: of all texts.
        tokenizer: whose tokens they are, a fingerprint; None before the first use.

    Raises:
        InputError: fewer than 65,536 bytes.
    """

    def __init__(self, max_bytes: int = 1 << 26) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < LEAST_BYTES:
            raise InputError(f"max_bytes={max_bytes!r} holds no texts: give at least {LEAST_BYTES}")
        self.max_bytes, self.lock = max_bytes, Lock()
        self.index = TextIndex(LENGTHS, MAX_CONTEXT)
        self.tokenizer: str | None = None

    def __repr__(self) -> str:
        size, most = self.index.bytes / 2**20, self.max_bytes / 2**20
        return f"Memory({len(self.index.ids):,} tokens, {size:.1f} of {most:.1f} MiB)"

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_bytes: int = 1 << 26) -> "Memory":
        """Read a file of `save`.

        Raises:
            InputError: the file does not exist, is not a memory, or is incomplete.
        """
        memory, name = cls(max_bytes), checked_path(path)
        try:
            with safe_open(name, "np") as file:
                metadata, ids = file.metadata() or {}, file.get_tensor("ids")
            if metadata["format"] != FORMAT or ids.ndim != 1 or ids.dtype != np.int32 or (ids < BREAK).any():
                raise ValueError("it holds something else")
            memory.tokenizer = metadata["tokenizer"] or None
        except FileNotFoundError as error:
            raise InputError(f"there is no memory {name}: give a file that Memory.save wrote, or Memory()") from error
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise InputError(f"{name} is not a memory, or is incomplete ({one_line(error, 160)}): {ADVICE}") from error
        memory.learn([*texts_of(ids)])
        return memory

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the texts and their tokenizer's fingerprint to a file, in safetensors.

        Raises:
            InputError: the file cannot be written.
        """
        with self.lock:
            ids = np.array(self.index.ids, np.int32)
        metadata = {"format": FORMAT, "tokenizer": self.tokenizer or ""}
        write_whole(path, save({"ids": ids}, metadata))

    def bind(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        """Take note of the tokenizer whose tokens the texts are, or will be.

        Args:
            tokenizer: the target's; None: known by its number of tokens alone.
            vocab_size: the target's.

        Raises:
            TokenizerMismatch: they are another's.
        """
        fingerprint = f"{vocab_size} ids" if tokenizer is None else tokenizer_fingerprint(tokenizer)
        with self.lock:
            if (self.tokenizer or fingerprint) != fingerprint or max(self.index.ids, default=0) >= vocab_size:
                advice = "give this target a memory of its own"
                raise TokenizerMismatch(f"the memory holds texts in another tokenizer's tokens: {advice}")
            self.tokenizer = fingerprint

    def learn(self, texts: Sequence[Sequence[int]]) -> None:
        """Add texts, and forget the oldest ones if there is no room."""
        with self.lock:
            for text in texts:
                self.index.begin()
                self.index.extend([int(token) for token in text])
                while self.index.bytes > self.max_bytes:
                    self._forget()

    def _forget(self) -> None:
        """Index the newest texts anew; sessions that read the old index go on with it until their next step."""
        size, fresh = len(self.index.ids), TextIndex(LENGTHS, MAX_CONTEXT)
        for text in self.index.texts(int(size * KEPT * self.max_bytes / self.index.bytes)):
            fresh.begin()
            fresh.extend(text)
        self.index = fresh


def checked_memory(memory: object) -> Memory | None:
    """Return a memory, read from a file if it is the path of one; None if there is none.

    Raises:
        InputError: something else, or a file that is no memory.
    """
    if isinstance(memory, str | os.PathLike):
        return Memory.load(memory)
    if not isinstance(memory, Memory | None):
        raise InputError(f"memory={memory!r:.60} is not a memory: give Memory(), the path of one, or None")
    return memory
