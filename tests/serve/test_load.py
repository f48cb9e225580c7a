"""Many clients at once, and the end of a server: nothing is lost, and each text is what it would be alone."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from conftest import byte_tokenizer, like, tiny_llama
from serving import TEMPLATE, Gate, Live, eventually, live, made_decoder

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.serve.application import Limits
from specinfer.serve.engine import Engine, Generation
from specinfer.serve.protocol import ApiError

PROMPTS = ["ab", "Hello there", "1 2 3 1 2 3", "The quick brown fox", "z"]


def test_texts_of_many_clients_are_those_of_each_alone() -> None:
    """300 requests from 32 threads: whole and in streams, of different lengths, greedy and with seeds."""
    model = tiny_llama(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    decoder = SpeculativeDecoder(model, byte_tokenizer(), ["ngram", like(model)], BestFirst(4, 3), compile=False)
    random = Random(0)
    asked = [
        {"prompt": random.choice(PROMPTS), "seed": random.randrange(4), "temperature": random.choice([0, 0.8])}
        | {"max_tokens": random.choice([1, 4, 9]), "stream": random.random() < 0.5}
        for _ in range(300)
    ]

    @cache
    def alone(prompt: str, max_tokens: int, **options: Any) -> tuple[str, int]:
        sampling = {"top_k": 0} if options["temperature"] else {}
        result = decoder.generate(prompt, raw=True, max_new_tokens=max_tokens, **options, **sampling)
        return result.text, len(result.token_ids)

    def ask(options: dict[str, Any]) -> tuple[str, int]:
        if not options["stream"]:
            answer = client.completions.create(model="tiny", **options)
            return answer.choices[0].text, answer.usage.completion_tokens
        chunks = list(client.completions.create(model="tiny", stream_options={"include_usage": True}, **options))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        return text, chunks[-1].usage.completion_tokens

    with live(decoder, Limits(max_rows=8)) as server, ThreadPoolExecutor(32) as threads:
        client = server.client()
        found = list(threads.map(ask, asked))
        assert eventually(lambda: server.busy == (0, 0))
        assert eventually(lambda: server.metric("request_success_total", finished_reason="length") == 300)
    wanted = [alone(**{name: value for name, value in options.items() if name != "stream"}) for options in asked]
    assert found == wanted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, as it is on a disk."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(max_position_embeddings=20_000).float().save_pretrained(path)
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained(path)
    return path


@contextmanager
def served(folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve a folder by the command; yield the process and its port."""
    command = [sys.executable, "-P", "-m", "specinfer", "serve", "--target", str(folder), "--draft", "ngram"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*command, "--port", str(port), "--served-name", "tiny"], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stderr
        found = (re.search(r"running on http://127\.0\.0\.1:(\d+)", line) for line in process.stderr)
        yield process, int(next(filter(None, found))[1])
    finally:
        process.kill()
        process.wait()


def begun(port: int, **options: Any) -> tuple[Any, list[Any]]:
    """Return a stream of the tiny model, and its first chunk."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        **{"model": "tiny", "prompt": "ab", "max_tokens": 400, "stream": True, **options}
    )
    return stream, [next(stream)]


def test_a_server_that_was_killed_is_started_again_and_ends_its_texts(folder: Path) -> None:
    """Clients have a broken connection, and no end of a text that is none; the port is free for the next one.

    SIGTERM lets texts end: the command stops taking requests, and the stream under way comes to its end.
    """
    with served(folder) as (process, port):
        streams = [begun(port, max_tokens=15_000, prompt=prompt) for prompt in PROMPTS]
        process.kill()
        for stream, chunks in streams:
            with pytest.raises(Exception, match=r"peer closed connection|Connection error|reset by peer"):
                chunks += stream
            assert not any(choice.finish_reason for chunk in chunks for choice in chunk.choices)
    with served(folder, port) as (process, again):
        assert again == port
        stream, chunks = begun(port)
        process.send_signal(signal.SIGTERM)
        chunks += stream
        assert chunks[-1].choices[0].finish_reason == "length"
        assert process.stderr
        assert "Application shutdown complete" in process.stderr.read()
        assert process.wait(600) in (0, -signal.SIGTERM)


def test_of_more_requests_than_fit_each_is_answered_or_sent_away() -> None:
    """As many as fit are decoded, the others are told to come again; then all is as it was."""
    decoder = made_decoder()

    async def flood(server: Live) -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)

        async def ask(seed: int) -> Any:
            try:
                return await client.completions.create(model="tiny", prompt="ab", max_tokens=2, seed=seed)
            except openai.InternalServerError as error:
                return error

        waiting = asyncio.gather(*map(ask, range(300)))
        rejected = partial(server.metric, "admission_rejections_total", reason="queue_full")
        assert await asyncio.to_thread(eventually, lambda: rejected() == 290)
        gate.opened.set()
        return await waiting

    with live(decoder, Limits(max_rows=2, max_queue=8)) as server, Gate(decoder) as gate:
        found = asyncio.run(flood(server))
        errors = [each for each in found if isinstance(each, Exception)]
        assert {(error.status_code, error.response.headers["retry-after"]) for error in errors} == {(503, "1")}
        assert [each.usage.completion_tokens for each in found if each not in errors] == [2] * 10
        assert eventually(lambda: server.busy == (0, 0))
        assert server.client().completions.create(model="tiny", prompt="ab", max_tokens=2).choices


def test_texts_that_do_not_end_in_time_are_cut(folder: Path) -> None:
    """The thread of the engine ends with the server, whoever waits for it."""
    decoder = SpeculativeDecoder.from_pretrained(str(folder), "ngram", dtype="float32", compile=False)
    with live(decoder) as server:
        server.server.config.timeout_graceful_shutdown = 0
        stream = server.client().completions.create(model="tiny", prompt="ab", stream=True)
        next(stream)
    with pytest.raises((openai.APIError, Exception)) as error:
        list(stream)
    assert not isinstance(error.value, json.JSONDecodeError)
    assert eventually(lambda: server.busy == (0, 0))


def test_what_waits_for_the_thread_is_told_that_it_ends() -> None:
    """A prompt that was to be scored gets the protocol's error, and is no task that somebody cancelled."""
    decoder = made_decoder()

    async def end(gate: Gate) -> None:
        engine = Engine(decoder.scheduler(2), 2)
        engine.start()
        engine.submit([decoder.prepare("Hello", raw=True, max_new_tokens=8)], Generation(engine))
        await asyncio.to_thread(gate.reached.wait, 600)
        call = asyncio.create_task(engine.call(list))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        assert await asyncio.to_thread(eventually, lambda: engine._closing)
        gate.opened.set()
        with pytest.raises(ApiError, match="shutting down"):
            await call
        await closing

    with Gate(decoder) as gate:
        asyncio.run(end(gate))
