"""The server's application: routes, limits, and its life, for uvicorn and every other ASGI server.

Knows: HTTP, streams of events, clients that go away.  Does not know: prompts, texts, how they are decoded.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from time import time
from typing import TypeAlias, TypeVar

from msgspec import Struct
from msgspec.json import encode
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from specinfer.decoder import SpeculativeDecoder
from specinfer.engine.scheduler import MAX_ROWS
from specinfer.engine.store import PrefixStore
from specinfer.errors import InputError, SamplingError
from specinfer.serve.answer import Served
from specinfer.serve.chat import Chat
from specinfer.serve.completions import Completion
from specinfer.serve.engine import Engine, Generation, within
from specinfer.serve.guard import Guard
from specinfer.serve.protocol import ApiError, ChatBody, CompletionBody, ResponseBody, failed, overdue, parsed, refused
from specinfer.serve.responses import Reply

log = logging.getLogger(__name__)
B = TypeVar("B", bound=Struct)
Answers: TypeAlias = Chat | Completion  # Reply is a Chat
EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
KEEP_ALIVE = b": keep-alive\n\n"
GONE = 499  # status of an answer that nobody reads
WAIT = 1.0  # seconds without a step after which somebody looks whether the client of a whole answer is still there


@dataclass(frozen=True)
class Limits:
    """The most that a server takes.

    Attributes:
        max_rows: texts decoded at a time.
        max_queue: texts that wait beside them; more are refused with 503.
        cache_megabytes: memory for prompts and texts that later ones begin with, of 10**6 bytes; 0 keeps none.  None is
            a quarter of what is free.
        max_body: bytes of a request.
        keep_alive: seconds without news after which a stream says that it is alive.
        write_timeout: seconds for which a reader of a stream may take nothing.
        request_timeout: seconds that an answer may take, from the end of its request's body.
        queue_timeout: of these, seconds in which one of its texts is to be begun.
    """

    max_rows: int = MAX_ROWS
    max_queue: int = 256
    cache_megabytes: float | None = None
    max_body: int = 2 * 1024 * 1024
    keep_alive: float = 15.0
    write_timeout: float = 60.0
    request_timeout: float = inf
    queue_timeout: float = inf


class Events(StreamingResponse):
    """A stream of events, which ends its generation however it ends itself."""

    def __init__(self, events: AsyncIterator[bytes], generation: Generation, write_timeout: float) -> None:
        super().__init__(events, headers=EVENTS, media_type="text/event-stream")
        self.generation, self.write_timeout = generation, write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end, the client goes away, or it takes nothing for too long."""

        async def patient(message: Message) -> None:
            async with asyncio.timeout(self.write_timeout):
                await send(message)

        try:
            await super().__call__(scope, receive, patient)
        except TimeoutError:
            log.info("a reader took nothing for %s s, and its stream is closed", self.write_timeout)
        finally:
            self.generation.close()


class Server:
    """The application that answers requests.

    Args:
        served: the model.
        limits: the most that is taken.
    """

    def __init__(self, served: Served, limits: Limits) -> None:
        self.served, self.limits, self.began = served, limits, int(time())
        scheduler = served.decoder.scheduler(limits.max_rows, PrefixStore(limits.cache_megabytes))
        self.engine = Engine(scheduler, limits.max_queue)

    @asynccontextmanager
    async def life(self, app: Starlette) -> AsyncIterator[None]:
        """Run the engine, and one thread for prompts: fast tokenizers are not for several."""
        self.engine.start()
        with ThreadPoolExecutor(1, "specinfer prompts") as self.reader:
            yield
        await asyncio.to_thread(self.engine.close)

    @property
    def routes(self) -> list[Route]:
        """The paths that may be asked for."""
        return [
            self._answering("/v1/chat/completions", ChatBody, Chat),
            self._answering("/v1/completions", CompletionBody, Completion),
            self._answering("/v1/responses", ResponseBody, Reply),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]

    async def health(self, request: Request) -> Response:
        """Say whether texts are taken."""
        return as_json({"status": "ok"}) if self.engine.alive else as_json({"status": "closed"}, 503)

    async def metrics(self, request: Request) -> Response:
        """Return counts and times."""
        return PlainTextResponse(self.engine.metrics.text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def models(self, request: Request) -> Response:
        """Return the one model, as a list."""
        return as_json({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        """Return the one model by its name."""
        self._check_model(request.path_params["name"])
        return as_json(self._model)

    def _answering(self, path: str, kind: type[B], answer: Callable[[B, Served, str], Answers]) -> Route:
        """Return the route of requests of a kind, given what answers one."""

        async def answered(request: Request) -> Response:
            body = parsed(await self._body(request), kind)
            return await self._answered(request, answer(body, self.served, _client(request)))

        return Route(path, answered, methods=["POST"])

    async def _answered(self, request: Request, answer: Answers) -> Response:
        """Return an answer, whole or as a stream; whatever can be wrong with a request is told before it begins."""
        self._check_model(answer.body.model)
        generation = Generation(self.engine, self.limits.request_timeout, self.limits.queue_timeout)
        with self.engine.reserved(answer.texts):
            await self._begin(answer, generation)
        if answer.body.stream:
            return Events(self._events(answer, generation), generation, self.limits.write_timeout)
        try:
            while not generation.done:
                await generation.news(WAIT)
                if await request.is_disconnected():
                    return Response(status_code=GONE)
            return as_json(answer.whole())
        finally:
            generation.close()

    async def _begin(self, answer: Answers, generation: Generation) -> None:
        """Prepare an answer's requests, and give them to the engine."""
        try:
            async with within(generation.whole):
                requests = await asyncio.get_running_loop().run_in_executor(self.reader, answer.prepare)
                answer.scores = [await self.engine.call(score) for score in answer.scoring()]
        except TimeoutError:
            raise overdue(generation.whole) from None
        except (InputError, SamplingError) as error:
            raise refused(error) from error
        self.engine.submit(requests, generation)

    async def _events(self, answer: Answers, generation: Generation) -> AsyncIterator[bytes]:
        """Yield the lines of a stream."""
        try:
            for chunk in answer.first_chunks():
                yield answer.event(chunk)
            while not answer.ended:
                if not await generation.news(self.limits.keep_alive):
                    yield KEEP_ALIVE
                for chunk in answer.chunks():
                    yield answer.event(chunk)
            if answer.usage_asked:
                yield answer.event(answer.usage_chunk())
        except ApiError as error:
            yield answer.event(answer.failure(error))
        except Exception:
            log.exception("a stream failed")
            yield answer.event(answer.failure(failed()))
        if answer.end:
            yield answer.end

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            ApiError: it is too large, or does not say that it is JSON: then a page in a browser may have sent it.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(400, "the body must be JSON: send Content-Type: application/json")
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > self.limits.max_body:
                    raise ApiError(413, f"the body has more than {self.limits.max_body} bytes: send less at a time")
        except ClientDisconnect:
            raise ApiError(GONE, "the client went away before the body ended") from None
        return bytes(body)

    def _check_model(self, name: str | None) -> None:
        """Raise `ApiError` for another model's name; none is the one."""
        if name not in (None, self.served.name):
            message = f"the model {name!r:.100} is not served here: ask for {self.served.name}"
            raise ApiError(404, message, "model", "model_not_found")

    @property
    def _model(self) -> dict[str, object]:
        named = {"id": self.served.name, "object": "model", "created": self.began, "owned_by": "specinfer"}
        return named | {"max_model_len": self.served.context}


def application(
    decoder: SpeculativeDecoder,
    name: str | None = None,
    *,
    context: int | None = None,
    max_tokens: int | None = None,
    limits: Limits = Limits(),
    keys: Sequence[str] = (),
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> Starlette:
    """Return the ASGI application that serves a decoder.

    Args:
        decoder: with a tokenizer.  While the application lives, only it may use the decoder.
        name: of the model, for clients; by default the target's.
        context: tokens of a prompt and its text at most; by default the target's context.
        max_tokens: of a text whose request names no number; by default the rest of the context.
        limits: the most that is taken.
        keys: one of them is to be sent with every request but those for ``/health``.
        hosts: without keys, names of the host that are answered to; any if there are none.
        origins: of pages in browsers that may ask.

    Raises:
        InputError: the decoder has no tokenizer.
    """
    if decoder.tokenizer is None:
        raise InputError("a server reads and writes text: construct the decoder with a tokenizer")
    server = Server(Served(decoder, name, context, max_tokens), limits)
    cors = Middleware(CORSMiddleware, allow_origins=[*origins], allow_methods=["*"], allow_headers=["*"])
    return Starlette(
        routes=server.routes,
        middleware=[*([cors] if origins else []), Middleware(Guard, keys, hosts)],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _told),
        lifespan=server.life,
    )


def as_json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer with a value as its body."""
    return Response(encode(content), status, headers, "application/json")


def _client(request: Request) -> str:
    """Return a digest that tells the owners of keys apart without the keys."""
    return sha256(request.headers.get("authorization", "").encode()).hexdigest()


async def _told(request: Request, error: Exception) -> Response:
    """Tell of an error; others than ours are of a route that is not there or does not take the method, or failures."""
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = ApiError(error.status_code, message, headers=error.headers)
    told = error if isinstance(error, ApiError) else failed()
    return as_json(told.body, told.status, told.headers)
