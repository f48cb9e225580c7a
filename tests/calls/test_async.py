"""Streams in coroutines: the event loop goes on, and what is closed or cancelled is released."""

import asyncio
import gc
import threading
import weakref
from contextlib import aclosing
from typing import Any

import pytest
import torch
from conftest import byte_tokenizer, like, tiny_llama

from specinfer import BestFirst, SpeculativeDecoder
from specinfer.attention import TreeSession
from specinfer.errors import NumericalError

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    model = tiny_llama()
    return SpeculativeDecoder(model, byte_tokenizer(), [like(model)], BestFirst(6, 3))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[TreeSession]]:
    """Every session of a model that is opened: references that hold nothing."""
    opened: list[weakref.ref[TreeSession]] = []
    begin = TreeSession.__init__

    def opening(session: TreeSession, *args: Any, **options: Any) -> None:
        opened.append(weakref.ref(session))
        begin(session, *args, **options)

    monkeypatch.setattr(TreeSession, "__init__", opening)
    return opened


def released(sessions: list[weakref.ref[TreeSession]]) -> bool:
    gc.collect()
    return bool(sessions) and not any(session() for session in sessions)


class Gate:
    """A logits processor that waits, from a number of tokens on, until it is opened."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.reached, self.opened = tokens, threading.Event(), threading.Event()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Wait, and change nothing."""
        if ids.shape[1] >= self.tokens:
            self.reached.set()
            assert self.opened.wait(60)
        return scores


def test_pieces_are_those_of_a_plain_stream(decoder: SpeculativeDecoder) -> None:
    async def pieces() -> list[str]:
        stream = decoder.stream("abc", **OPTIONS)
        found = [piece async for piece in stream]
        assert stream.result.finish_reason == "length"
        return found

    assert asyncio.run(pieces()) == list(decoder.stream("abc", **OPTIONS))


def test_several_streams_take_turns(decoder: SpeculativeDecoder) -> None:
    async def text(seed: int) -> str:
        return "".join([piece async for piece in decoder.stream("abc", **{**OPTIONS, "seed": seed})])

    async def texts() -> list[str]:
        return await asyncio.gather(*map(text, range(3)))

    assert asyncio.run(texts()) == [decoder.generate("abc", **{**OPTIONS, "seed": seed}).text for seed in range(3)]


def test_the_event_loop_goes_on_while_a_step_runs(decoder: SpeculativeDecoder) -> None:
    gate = Gate(4)

    async def opened_in_between() -> str:
        stream = decoder.stream("abc", logits_processor=gate, **OPTIONS)
        piece = asyncio.ensure_future(anext(stream))
        while not gate.reached.is_set():  # the step has begun, and waits for this loop
            await asyncio.sleep(0)
        assert not piece.done()
        gate.opened.set()
        return await piece

    assert asyncio.run(opened_in_between())


def test_a_cancelled_task_releases_the_caches_after_its_step(
    decoder: SpeculativeDecoder, sessions: list[weakref.ref[TreeSession]]
) -> None:
    gate = Gate(6)

    async def cancelled() -> None:
        stream = decoder.stream("abc", logits_processor=gate, **OPTIONS)

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.create_task(read())
        while not gate.reached.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not released(sessions)  # the step is still under way
        gate.opened.set()
        await stream.aclose()
        assert released(sessions)
        assert [piece async for piece in stream] == []
        assert stream.result.finish_reason == "unfinished"

    asyncio.run(cancelled())


@pytest.mark.parametrize("pieces", [0, 2])
def test_a_closed_stream_releases_the_caches(
    decoder: SpeculativeDecoder, sessions: list[weakref.ref[TreeSession]], pieces: int
) -> None:
    async def closed() -> None:
        async with aclosing(decoder.stream("abc", **OPTIONS)) as stream:
            for _ in range(pieces):
                await anext(stream)
        assert released(sessions) if pieces else not sessions
        assert len(stream.result.steps) >= pieces

    asyncio.run(closed())


def test_errors_reach_the_coroutine(decoder: SpeculativeDecoder) -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, torch.nan) if ids.shape[1] > 5 else scores

    async def read() -> None:
        async for _ in decoder.stream("abc", logits_processor=broken, **OPTIONS):
            pass

    with pytest.raises(NumericalError, match="NaN"):
        asyncio.run(read())
