"""The meaning of tokens: the bytes of their text, whichever way a tokenizer writes them.

Knows: byte-level tables (GPT-2), SentencePiece tables (a low line for a space, ``<0x0A>`` for a byte), added tokens.
Does not know: models, drafts, how text is cut into tokens.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specinfer.common.records import Record

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a SentencePiece token that is one byte
SPACE = "\u2581"  # SentencePiece writes it for a space


def _byte_table() -> dict[str, int]:
    """Return the byte that each character of a byte-level table stands for (Radford et al. 2019, GPT-2)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]  # these bytes are written as themselves
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_LEVEL = _byte_table()


def byte_level(piece: str) -> bytes:
    """Return the bytes of a token of a byte-level table."""
    return bytes(BYTE_LEVEL[c] for c in piece) if BYTE_LEVEL.keys() >= set(piece) else piece.encode()


def sentence_piece(piece: str) -> bytes:
    """Return the bytes of a token of a SentencePiece table."""
    byte = BYTE.fullmatch(piece)
    return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode()


def token_texts(tokenizer: "PreTrainedTokenizerBase") -> dict[int, bytes | str] | None:
    """Return the meaning of each token id: bytes of text, or the name of a special token.

    Args:
        tokenizer: of ``transformers``.

    Returns:
        None if its tokens are written in another way than the two known here, WordPiece for example.
    """
    read = _reader(tokenizer)
    if read is None:
        return None
    added = tokenizer.added_tokens_decoder
    texts: dict[int, bytes | str] = {i: read(piece) for piece, i in tokenizer.get_vocab().items() if i not in added}
    return texts | {i: token.content if token.special else token.content.encode() for i, token in added.items()}


def _reader(tokenizer: object) -> Callable[[str], bytes] | None:
    """Return how a tokenizer's tokens are read, judged by how it decodes them."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return None
    steps = list(_steps(json.loads(decoder.__getstate__())))
    if any(step["type"] == "ByteLevel" for step in steps):
        return byte_level
    spaces = [step for step in steps if step["type"] == "Metaspace" or step.get("pattern") == {"String": SPACE}]
    return sentence_piece if spaces else None


def _steps(decoder: "Record") -> "Iterator[Record]":
    """Yield the steps of a decoder of the ``tokenizers`` library, those of sequences one by one."""
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder
