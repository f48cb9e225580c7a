"""Streams, byte for byte, and what becomes of them when somebody goes away or something fails."""

import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import HELLO, Gate, Live, eventually, live, made_decoder

from specinfer import SpeculativeDecoder
from specinfer.serve.application import Limits
from specinfer.serve.choice import AfterPrompt, Choice, News

SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "max_tokens": 6}
ENGINES: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": 250, "ignore_eos": True}
VARIES = re.compile(rb'("id":"\w+-)\w+(","object":"[\w.]+","created":)\d+(.*?"system_fingerprint":"fp_)\w+')


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return made_decoder()


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[Live]:
    with live(decoder, Limits(max_rows=2, max_queue=2, max_body=100_000, keep_alive=0.05, write_timeout=2)) as running:
        yield running


def sent(server: Live, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
    """Send a request by hand; return its connection."""
    data = json.dumps({"messages": HELLO, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection = server.connect()
    connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return connection


def received(connection: socket.socket) -> tuple[int, bytes, bytes]:
    """Return status, head and body of an answer, chunks of HTTP put together."""
    with connection:
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        parts = []
        while body:
            size, _, body = body.partition(b"\r\n")
            parts.append(body[: int(size, 16)])
            body = body[int(size, 16) + 2 :]
        body = b"".join(parts)
    return int(head.split()[1]), head, body


def lines(body: bytes) -> list[bytes]:
    """Return the events of a stream, comments left out, with what differs from run to run replaced."""
    events = body.split(b"\n\n")
    assert events.pop() == b""
    return [VARIES.sub(rb"\1ID\g<2>0\3FP", event) for event in events if not event.startswith(b":")]


def test_a_chat_stream_byte_for_byte(server: Live, decoder: SpeculativeDecoder) -> None:
    text = decoder.generate(HELLO, max_new_tokens=6, temperature=0.9, seed=7, top_k=0).text
    options = {"stream": True, "stream_options": {"include_usage": True}, **SAMPLED}
    status, head, body = received(sent(server, options))
    assert status == 200
    assert b"content-type: text/event-stream; charset=utf-8\r\n" in head
    assert b"cache-control: no-cache\r\n" in head
    assert b"x-accel-buffering: no\r\n" in head
    begin = b'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"tiny",'
    begin += b'"system_fingerprint":"fp_FP","choices":['
    first, *middle, last, used, done = lines(body)
    open_end = b'"logprobs":null,"finish_reason":null}],"usage":null}'
    assert first == begin + b'{"index":0,"delta":{"role":"assistant","content":""},' + open_end
    said = ""
    for event in middle:
        content = json.loads(event[6:])["choices"][0]["delta"]["content"]
        said += content
        written = json.dumps(content, ensure_ascii=False).encode()
        assert event == begin + b'{"index":0,"delta":{"content":' + written + b"}," + open_end
    assert said == text
    ending = b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","seed":7}],"usage":null}'
    assert last == begin + ending
    wanted = begin + b'],"usage":{"prompt_tokens":28,"completion_tokens":6,"total_tokens":34,'
    wanted += (
        b'"prompt_tokens_details":{"cached_tokens":%d},'
        % json.loads(used[6:])["usage"]["prompt_tokens_details"]["cached_tokens"]
    )
    assert used.startswith(wanted + b'"completion_tokens_details":{"speculation":{"target_passes":')
    assert done == b"data: [DONE]"


def test_a_completion_stream_byte_for_byte(server: Live) -> None:
    body = received(sent(server, {"prompt": "ab", "stream": True, "n": 2, **SAMPLED}, "/v1/completions"))[2]
    *events, done = lines(body)
    begin = b'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"tiny",'
    begin += b'"system_fingerprint":"fp_FP","choices":[{"index":'
    assert all(event.startswith(begin) for event in events)
    ends = {begin + b'%d,"text":"","logprobs":null,"finish_reason":"length","seed":%d}]}' % (i, 7 + i) for i in (0, 1)}
    assert ends == {event for event in events if b'"length"' in event}
    assert all(event.endswith(b'"logprobs":null,"finish_reason":null}]}') for event in events if event not in ends)
    assert done == b"data: [DONE]"


def test_a_stop_string_is_not_told_while_its_text_ends(decoder: SpeculativeDecoder, monkeypatch: Any) -> None:
    """The engine's thread adds a step, and then says that it was the last one: a reader may come between."""
    text, told = decoder.generate("ab", raw=True, **ENGINES).text, list[News | None]()
    request = decoder.prepare("ab", raw=True, stop_strings=text[1:3], stopping=AfterPrompt, **ENGINES)
    choice, end = Choice(request, [text[1:3]]), request.end
    monkeypatch.setattr(request, "end", lambda reason: (told.append(choice.news()), end(reason)))
    scheduler = decoder.scheduler()
    scheduler.add(request)
    while not request.done:
        scheduler.step()
    told.append(choice.news())
    assert "".join(news.text for news in told if news) == text[:1]
    scheduler.close()


def test_a_stream_that_waits_says_that_it_is_alive(server: Live, decoder: SpeculativeDecoder) -> None:
    with Gate(decoder) as gate:
        connection = sent(server, {"stream": True, **SAMPLED})
        seen = b""
        while seen.count(b": keep-alive\n\n") < 2:
            seen += connection.recv(65536)
        gate.opened.set()
        while not seen.endswith(b"0\r\n\r\n"):
            seen += connection.recv(65536)
    assert seen.count(b"[DONE]") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["waiting", "decoding"])
def test_a_client_that_goes_away_leaves_room(
    server: Live, decoder: SpeculativeDecoder, stream: bool, when: str
) -> None:
    """Its text ends with the step under way, and others are what they would be."""
    client, aborted = server.client(), server.metric("request_success_total", finished_reason="abort")
    with Gate(decoder) as gate:
        others = [sent(server, LONG) for _ in range(2 if when == "waiting" else 1)]
        assert gate.reached.wait(600)
        leaving = sent(server, {"stream": stream, **LONG, "ignore_eos": True})
        assert eventually(lambda: sum(server.busy) == len(others) + 1)
        if when == "decoding":
            gate.opened.set()
            assert eventually(lambda: server.busy == (2, 0))
        leaving.close()
        gate.opened.set()
        assert eventually(lambda: server.metric("request_success_total", finished_reason="abort") == aborted + 1)
    for other in others:
        status, _, body = received(other)
        assert status == 200
        assert json.loads(body)["choices"][0]["finish_reason"] == "length"
    assert client.completions.create(model="tiny", prompt="ab", max_tokens=3).usage.completion_tokens <= 3
    assert eventually(lambda: server.busy == (0, 0))


def test_a_client_that_goes_away_in_a_body_is_no_failure(server: Live, monkeypatch: Any) -> None:
    logged: list[Any] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda *args, **_: logged.append(args))
    connection = server.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    connection.sendall(head + b"Expect: 100-continue\r\nContent-Length: 99\r\n\r\n")
    assert connection.recv(4) == b"HTTP"  # the body is waited for
    connection.close()
    assert received(sent(server, SAMPLED))[0] == 200
    assert not logged


def test_a_full_queue_is_said(server: Live, decoder: SpeculativeDecoder) -> None:
    """In the protocol's shape; the client tries again by itself."""
    rejected = server.metric("admission_rejections_total", reason="queue_full")
    with Gate(decoder) as gate:
        taken = [sent(server, {"n": 2, **SAMPLED}) for _ in range(2)]
        assert eventually(lambda: sum(server.busy) == 4)
        status, head, body = received(sent(server, {"stream": True, **SAMPLED}))
        assert (status, b"retry-after: 1\r\n" in head) == (503, True)
        assert json.loads(body)["error"]["code"] == "overloaded"
        with pytest.raises(openai.InternalServerError) as error:
            server.client().chat.completions.create(model="tiny", messages=HELLO)
        assert error.value.status_code == 503
        gate.opened.set()
    assert [received(connection)[0] for connection in taken] == [200, 200]
    assert server.metric("admission_rejections_total", reason="queue_full") == rejected + 2
    assert server.client(max_retries=2).chat.completions.create(model="tiny", messages=HELLO, max_tokens=2).choices


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_given_up(decoder: SpeculativeDecoder, stream: bool) -> None:
    """Its row is free with the next step, and others are what they would be; to ask again would not help."""
    with live(decoder, Limits(max_rows=1, request_timeout=0.4)) as server, Gate(decoder) as gate:
        status, head, body = received(sent(server, {"stream": stream, **LONG}))
        assert (status, b"x-should-retry: false\r\n" in head) == ((200, False) if stream else (408, True))
        error, *done = lines(body)[-2:] if stream else [b"data: " + body]
        assert done == [b"data: [DONE]"] * stream
        assert json.loads(error[6:])["error"]["code"] == "timeout"
        gate.opened.set()
        assert eventually(lambda: server.busy == (0, 0))
        assert server.metric("request_success_total", finished_reason="abort") == 1
        assert received(sent(server, SAMPLED))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_waits_too_long_is_told_so(decoder: SpeculativeDecoder, stream: bool) -> None:
    """Those that were begun may take their time."""
    with live(decoder, Limits(max_rows=1, queue_timeout=0.4)) as server, Gate(decoder) as gate:
        first = sent(server, {"stream": stream, **SAMPLED})
        assert gate.reached.wait(600)
        status, head, body = received(sent(server, {"stream": stream, **SAMPLED}))
        assert (status, b"retry-after: 1\r\n" in head) == ((200, False) if stream else (503, True))
        assert b'"code":"overloaded"' in body
        assert server.metric("admission_rejections_total", reason="queue_timeout") == 1
        gate.opened.set()
        status, _, body = received(first)
        assert (status, b'"finish_reason":"length"' in body, b'"error"' in body) == (200, True, False)


def test_more_texts_than_fit_are_refused_at_once(server: Live) -> None:
    """To try again would not help."""
    with pytest.raises(openai.BadRequestError, match="ask for fewer"):
        server.client().completions.create(model="tiny", prompt=["a"] * 5, max_tokens=1)


def failing(*_: Any) -> None:
    raise RuntimeError("a secret of the machine")


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_ends_what_is_under_way_and_nothing_else(
    server: Live, decoder: SpeculativeDecoder, stream: bool
) -> None:
    """Clients are told, without details, as a status or as an event after the headers."""
    hook = decoder.target.model.register_forward_pre_hook(failing)
    try:
        status, _, body = received(sent(server, {"stream": stream, **SAMPLED}))
    finally:
        hook.remove()
    assert b"secret" not in body
    if stream:
        assert status == 200
        error, done = lines(body)[-2:]
        assert done == b"data: [DONE]"
        assert json.loads(error[6:])["error"]["type"] == "server_error"
    else:
        assert status == 500
        assert json.loads(body)["error"]["type"] == "server_error"
    assert received(sent(server, SAMPLED))[0] == 200
    assert eventually(lambda: server.busy == (0, 0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_died_is_said(decoder: SpeculativeDecoder, stream: bool) -> None:
    def dying(*_: Any) -> None:
        raise SystemExit

    with live(decoder) as server:
        hook = decoder.target.model.register_forward_pre_hook(dying)
        try:
            status, _, body = received(sent(server, {"stream": stream, **SAMPLED}))
        finally:
            hook.remove()
        assert (status, b'"server_error"' in body) == (200 if stream else 500, True)
        with pytest.raises(openai.InternalServerError) as error:
            server.client().chat.completions.create(model="tiny", messages=HELLO)
        assert error.value.status_code == 503
        with pytest.raises(openai.InternalServerError):
            server.client(base_url=server.url).get("/health", cast_to=object)


def test_the_client_raises_an_error_that_comes_in_a_stream(server: Live, decoder: SpeculativeDecoder) -> None:
    hook = decoder.target.model.register_forward_pre_hook(failing)
    try:
        with pytest.raises(openai.APIError, match="the server failed"):
            list(server.client().chat.completions.create(model="tiny", messages=HELLO, stream=True, **SAMPLED))
    finally:
        hook.remove()


def test_a_reader_that_never_reads_holds_nobody_up(server: Live, decoder: SpeculativeDecoder) -> None:
    """Its text is decoded to the end, and its row is free for others; in the end its stream is closed."""
    silent = []
    for _ in range(2):
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.connect(("127.0.0.1", server.port))
        asked = {"stream": True, "logprobs": True, "top_logprobs": 20, **LONG, "max_tokens": 400}
        body = json.dumps({"messages": HELLO, **asked}).encode()
        reader.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        silent.append(reader)
    assert eventually(lambda: server.metric("num_requests_running") == 2)
    answer = server.client().chat.completions.create(model="tiny", messages=HELLO, **SAMPLED)
    assert answer.usage.completion_tokens == 6
    assert eventually(lambda: server.busy == (0, 0))
    for reader in silent:
        reader.close()
