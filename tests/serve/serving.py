"""A tiny model behind real sockets, which the tests of the server share."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import openai
import uvicorn
from conftest import EOS_TEXT, PAD_TEXT, byte_tokenizer, like, tiny_llama

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.serve.application import Limits, application

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
HELLO = [{"role": "user", "content": "Hello there"}]
CONTEXT = 512


def made_decoder(**tokenizer: Any) -> SpeculativeDecoder:
    """A target whose texts end by chance, with two drafts."""
    model = tiny_llama(eos_token_id=EOS_TEXT, pad_token_id=PAD_TEXT, max_position_embeddings=CONTEXT)
    made = byte_tokenizer(**{"chat_template": TEMPLATE, **tokenizer})
    return SpeculativeDecoder(model, made, ["ngram", like(model)], BestFirst(6, 3), compile=False)


class Live:
    """A server that runs, and clients of it."""

    def __init__(self, port: int, app: Any, server: uvicorn.Server) -> None:
        self.port, self.app, self.server = port, app, server
        self.url = f"http://127.0.0.1:{port}"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """Return OpenAI's own client."""
        usual = {"base_url": f"{self.url}/v1", "max_retries": 0, "timeout": 600}
        return openai.OpenAI(api_key=key, **{**usual, **options})

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric."""
        server = self.app.routes[-1].endpoint.__self__
        return server.engine.metrics.registry.get_sample_value(f"specinfer:{name}", labels) or 0.0

    @property
    def busy(self) -> tuple[float, float]:
        """How many texts are under way, and how many wait."""
        return self.metric("num_requests_running"), self.metric("num_requests_waiting")

    def connect(self) -> socket.socket:
        """Return a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=600)


@contextmanager
def live(decoder: SpeculativeDecoder, limits: Limits | None = None, **options: Any) -> Iterator[Live]:
    """Serve a decoder from a thread until the end."""
    app = application(decoder, "tiny", limits=limits or Limits(), **options)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5, timeout_keep_alive=600))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                thread.join(0.01)
            yield Live(listening.getsockname()[1], app, server)
        finally:
            server.should_exit = True
            thread.join()


class Gate:
    """Holds a model's passes back until it is opened."""

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        self.reached, self.opened = Event(), Event()
        self.hook = decoder.target.model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self.reached.set()
        assert self.opened.wait(600)

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: Any) -> None:
        self.opened.set()
        self.hook.remove()


def eventually(condition: Any) -> bool:
    """Return whether a condition holds within a minute."""
    for _ in range(6000):
        if condition():
            return True
        Event().wait(0.01)
    return False
