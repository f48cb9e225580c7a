"""Many clients at once, and the end of a server: nothing is lost, and each text is what it would be alone."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from conftest import byte_tokenizer, like, tiny_llama
from serving import TEMPLATE, Gate, eventually, live, made_decoder

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.serve.application import Limits
from specinfer.serve.engine import Engine, Patience
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
        assert server.busy == (0, 0)
        assert server.metric("request_success_total", finished_reason="length") == 300
    wanted = [alone(**{name: value for name, value in options.items() if name != "stream"}) for options in asked]
    assert found == wanted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, as it is on a disk."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_llama(max_position_embeddings=20_000).float().save_pretrained(path)
    byte_tokenizer(chat_template=TEMPLATE).save_pretrained(path)
    return path


def test_sigterm_lets_texts_end(folder: Path) -> None:
    """The command stops taking requests, and the stream under way comes to its end."""
    command = [sys.executable, "-P", "-m", "specinfer", "serve", "--target", str(folder), "--draft", "ngram"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*command, "--port", "0", "--served-name", "tiny"], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stderr
        line = next(line for line in process.stderr if "running on" in line)
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found
        client = openai.OpenAI(base_url=f"{found[0]}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="tiny", prompt="ab", max_tokens=400, stream=True)
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        chunks += stream
        assert chunks[-1].choices[0].finish_reason == "length"
        rest = process.stderr.read()
        assert "Application shutdown complete" in rest
        assert process.wait(600) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


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
    assert server.busy == (0, 0)


def test_what_waits_for_the_thread_is_told_that_it_ends() -> None:
    """A prompt that was to be scored gets the protocol's error, and is no task that somebody cancelled."""
    decoder = made_decoder()

    async def end(gate: Gate) -> None:
        engine = Engine(decoder.scheduler(2), 2)
        engine.start()
        engine.submit([decoder.prepare("Hello", raw=True, max_new_tokens=8)], Patience(0))
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
