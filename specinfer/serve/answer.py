"""The parts that answers share: requests of the engine, whole and in chunks, tokens used, the effect of speculation.

Knows: the protocol's objects, the decoder.  Does not know: HTTP, when steps are taken.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from math import isinf
from secrets import randbits
from time import time
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from msgspec.json import encode

from specinfer.calls.scoring import Score
from specinfer.common.versions import versions
from specinfer.decoder import SpeculativeDecoder
from specinfer.engine.options import Options
from specinfer.engine.requests import Request
from specinfer.results import Step
from specinfer.serve.choice import AfterPrompt, Choice, News
from specinfer.serve.protocol import ApiError, Body

B = TypeVar("B", bound=Body)
SEED_BITS = 53  # of a seed that is drawn: JavaScript reads it as it is
CONTEXT = 32_768  # tokens of prompt and text, for a target without a limit


class Served:
    """The model that a server answers with.

    Args:
        decoder: with a tokenizer.
        name: of the model, for clients; by default the target's.
        context: tokens of a prompt and its text at most; by default the target's context.
        max_tokens: of a text whose request names no number; None is the rest of the context.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, name: str | None, context: int | None, max_tokens: int | None
    ) -> None:
        usual = CONTEXT if isinf(decoder.context) else decoder.context
        self.decoder, self.name, self.max_tokens = decoder, name or decoder.target.checkpoint, max_tokens
        self.context = int(min(context or usual, decoder.context))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what texts depend on beside requests: under the same one, a seed gives the same text."""
        parts = [self.decoder.target.checkpoint, str(self.decoder.target.dtype), self.decoder.passes, versions()]
        return f"fp_{sha256(encode(parts)).hexdigest()[:12]}"


class Answer(Generic[B]):
    """The answer to a request, one choice for each text of each prompt.

    Args:
        body: of the request.
        served: the model that answers.
        client: who asks: a prefix that was read for one is not copied for another.

    Attributes:
        prompts: token ids, once `prepare` was called.
        choices: likewise.
        scores: of the prompts, if `scoring` asks for them.
    """

    prefix: ClassVar[str]  # of ids
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    source: ClassVar[str]  # the field of prompts
    end: ClassVar[bytes] = b"data: [DONE]\n\n"  # of streams

    def __init__(self, body: B, served: Served, client: str = "") -> None:
        self.body, self.served, self.salt = body, served, f"{client} {body.cache_salt or ''}"
        self.head = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time())}
        self.prompts: list[list[int]] = []
        self.choices: list[Choice] = []
        self.scores: list[Score] = []

    @property
    def texts(self) -> int:
        """How many texts were asked for."""
        return self.body.n or 1

    @property
    def usage_asked(self) -> bool:
        """Whether a stream ends with the counts of tokens used."""
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    @property
    def ended(self) -> bool:
        """Whether all texts have ended and were told."""
        return all(choice.ended for choice in self.choices)

    def read(self) -> Iterator[list[int]]:
        """Yield the token ids of the prompts."""
        raise NotImplementedError

    def options(self) -> Options:
        """Return the engine's options, those that depend on the prompt apart."""
        return self.body.options(self.served.decoder.target.model.generation_config)

    def choice(self, request: Request) -> Choice:
        """Return the choice of a request."""
        return Choice(request, self.body.stops)

    def scoring(self) -> list[Callable[[], Score]]:
        """Return the function to call in the engine's thread, for `scores`."""
        return []

    def prepare(self) -> list[Request]:
        """Read the prompts and check everything; return the engine's requests.

        Raises:
            ApiError, InputError, SamplingError: the request cannot be answered.
        """
        body, decoder = self.body, self.served.decoder
        options, count = self.options(), body.n or 1
        self.prompts, made = [*self.read()], list[Request]()
        for ids in self.prompts:
            first = randbits(SEED_BITS) if body.seed is None else body.seed
            options |= {
                "max_new_tokens": max(1, self._budget(len(ids))),
                "logits_processor": body.penalties(len(ids)),
                "cache_salt": self.salt,
            }
            for number in range(count):
                options["seed"] = first + number
                made.append(decoder.prepare(ids, stopping=AfterPrompt, **options))
        self.choices = [self.choice(request) for request in made]
        for request in made if body.max_tokens == 0 else ():
            request.end("length")  # before it begins
        return made

    def _budget(self, length: int) -> int:
        """Return how many tokens may follow a prompt; raise `ApiError` if they do not fit the context."""
        room, asked = self.served.context - length, self.body.max_tokens
        tokens = max(1, min(room, self.served.max_tokens or room)) if asked is None else asked
        if tokens > room:
            # clients look for these words, or for the code among them
            most = f"this model's maximum context length is {self.served.context} tokens"
            asked_for = f"{length} prompt tokens and {tokens} new ones exceed it: shorten the prompt, or ask for less"
            code = "context_length_exceeded"
            raise ApiError(400, f"{most}, and {asked_for} ({code})", self.source, code)
        return tokens

    # ---- bodies and chunks ----

    def event(self, chunk: dict[str, object]) -> bytes:
        """Return the lines of a chunk in a stream."""
        return b"data: %b\n\n" % encode(chunk)

    def failure(self, error: ApiError) -> dict[str, object]:
        """Return the chunk of an error."""
        return error.body

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks of the new text of all choices."""
        for index, choice in enumerate(self.choices):
            if news := choice.news():
                yield from self.chunks_of(index, news)

    def chunks_of(self, index: int, news: News) -> Iterator[dict[str, object]]:
        """Yield the chunks of a choice's new text."""
        raise NotImplementedError

    def usage_chunk(self) -> dict[str, object]:
        """Return the chunk of the tokens used."""
        return self._object(self.chunk_object) | {"choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, object]:
        """Return the answer in one piece, once all requests are done."""
        told = [(index, choice.news()) for index, choice in enumerate(self.choices)]
        choices = [self.whole_choice(index, news) for index, news in told if news]
        return self._object(self.whole_object) | {"choices": choices, "usage": self.usage()}

    def whole_choice(self, index: int, news: News) -> dict[str, object]:
        """Return a choice in one piece."""
        raise NotImplementedError

    def chunk(self, index: int, part: Mapping[str, object], logprobs: object, ended: bool = False) -> dict[str, object]:
        """Return the chunk of one choice.

        Args:
            index: of the choice.
            part: its text, in the form of the answer's kind.
            logprobs: of tokens, likewise.
            ended: whether the choice ends with it.
        """
        ending = self.ending(index) if ended else {"finish_reason": None}
        choice = {"index": index, **part, "logprobs": logprobs, **ending}
        return self._object(self.chunk_object) | {"choices": [choice]} | ({"usage": None} if self.usage_asked else {})

    def ending(self, index: int) -> dict[str, object]:
        """Return the fields of a choice that has ended, beside its text."""
        return {"finish_reason": self.choices[index].finish_reason, "seed": self.choices[index].seed}

    def usage(self) -> dict[str, Any]:
        """Return how many tokens were read and written, and how speculation did."""
        read, written = sum(map(len, self.prompts)), sum(len(choice.ids) for choice in self.choices)
        cached = sum(choice.request.cached_tokens for choice in self.choices[:: self.body.n or 1])
        steps = [step for choice in self.choices for step in choice.request.steps]
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"speculation": _speculation(steps, written)},
        }

    def _object(self, kind: str) -> dict[str, object]:
        head = {"id": self.head["id"], "object": kind, "created": self.head["created"], "model": self.served.name}
        return head | {"system_fingerprint": self.served.fingerprint}


def _speculation(steps: Sequence[Step], written: int) -> dict[str, object]:
    """Return the effect of speculation in steps that wrote some tokens."""
    return {
        "target_passes": len(steps),
        "tokens_per_pass": round(written / len(steps), 3) if steps else 0.0,
        "drafted_tokens": sum(step.tree.num_drafted for step in steps),
        "accepted_tokens": sum(min(len(step.path), len(step.tokens)) for step in steps),
        "accepted_by_draft": Counter(name for step in steps for names in step.drafted_by for name in names),
    }
