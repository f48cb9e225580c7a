"""What is refused before anything is decoded: bodies, routes, keys, hosts."""

import http.client
import importlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serving import CONTEXT, HELLO, Live, live, made_decoder

from specinfer import SpeculativeDecoder, cli
from specinfer.cli import options
from specinfer.cli.serve import Access
from specinfer.errors import InputError
from specinfer.serve.application import Limits, application

serve = importlib.import_module("specinfer.cli.serve")  # `cli.serve` is the command
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
BODY = json.dumps({"messages": HELLO, "max_tokens": 2})


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return made_decoder()


@pytest.fixture(scope="module")
def server(decoder: SpeculativeDecoder) -> Iterator[Live]:
    with live(decoder, Limits(max_body=10_000), hosts=["127.0.0.1", "localhost", "::1"]) as running:
        yield running


def asked(server: Live, method: str, path: str, body: Any = None, headers: Any = JSON) -> tuple[int, Any, Any]:
    """Return status, body and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, json.loads(data) if data.startswith(b"{") else data, answer.headers


BAD: dict[str, tuple[int, str, str, Any, Any]] = {
    "broken JSON": (400, "POST", CHAT, '{"messages": [', JSON),
    "no JSON": (400, "POST", CHAT, b"\xff\xfe", JSON),
    "half a surrogate pair": (400, "POST", CHAT, '{"messages":[{"role":"user","content":"\\ud800"}]}', JSON),
    "a list": (400, "POST", CHAT, "[]", JSON),
    "nothing": (400, "POST", CHAT, "", JSON),
    "deep": (400, "POST", CHAT, '{"messages":' + "[" * 4000 + "]" * 4000 + "}", JSON),
    "no messages": (400, "POST", CHAT, "{}", JSON),
    "another content type": (400, "POST", CHAT, BODY, {"Content-Type": "text/plain"}),
    "another host": (400, "POST", CHAT, BODY, {**JSON, "Host": "evil.example"}),
    "too large": (413, "POST", CHAT, "x" * 10_001, JSON),
    "too large, in chunks": (413, "POST", CHAT, iter([b"x" * 5000] * 3), JSON),
    "no route": (404, "GET", "/v2", None, {}),
    "no method": (405, "GET", CHAT, None, {}),
    "no method for models": (405, "POST", "/v1/models", "{}", JSON),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_have_the_protocols_shape(server: Live, name: str) -> None:
    status, *request = BAD[name]
    found, body, headers = asked(server, *request)
    assert found == status
    assert headers["content-type"] == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert asked(server, "POST", CHAT, BODY)[0] == 200


def test_health_and_metrics(server: Live) -> None:
    assert asked(server, "GET", "/health")[:2] == (200, {"status": "ok"})
    status, text, headers = asked(server, "GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert f"specinfer:spec_decode_{name}_total".encode() in text


def test_metrics_count_what_answers_say(server: Live) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "spec_decode_num_accepted_tokens_total")
    before = [server.metric(name) for name in names]
    usage = server.client().chat.completions.create(model="tiny", messages=HELLO, n=3, max_tokens=30, seed=1).usage
    did = usage.completion_tokens_details.speculation
    wanted = [3 * usage.prompt_tokens, usage.completion_tokens, did["accepted_tokens"]]
    assert [server.metric(name) - value for name, value in zip(names, before, strict=True)] == wanted
    assert server.metric("time_to_first_token_seconds_count") == server.metric("request_queue_time_seconds_count") > 0


def test_keys_guard_everything_but_health(decoder: SpeculativeDecoder) -> None:
    with live(decoder, keys=["first", "second"]) as server:
        for key in ("first", "second"):
            assert server.client(key).models.list()
        for key in ("third", "", "first second"):
            with pytest.raises(openai.AuthenticationError) as error:
                server.client(key or "-").models.list()
            assert error.value.type == "authentication_error"
        for path in ("/metrics", "/v1/models", "/v2", CHAT):
            status, _, headers = asked(server, "GET", path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert asked(server, "GET", "/health")[0] == 200
        assert asked(server, "GET", "/v1/models", None, {"Authorization": "Basic first"})[0] == 401


def test_prompts_that_were_read_are_copied_for_their_owner_alone(decoder: SpeculativeDecoder) -> None:
    told: Any = [{"role": "user", "content": "Once upon a time there was a long, long prompt."}]
    with live(decoder, keys=["first", "second"]) as server:

        def ask(key: str, **more: Any) -> Any:
            asked = {"model": "tiny", "messages": told, "max_tokens": 4, "temperature": 0}
            return server.client(key).chat.completions.create(**asked, extra_body=more)

        def cached(answer: Any) -> int:
            return answer.usage.prompt_tokens_details.cached_tokens

        first = ask("first")
        assert cached(first) == 0
        assert cached(again := ask("first")) == first.usage.prompt_tokens - 1
        assert again.choices == first.choices
        assert cached(ask("second")) == cached(ask("first", cache_salt="mine")) == 0
        assert cached(ask("first", cache_salt="mine")) == cached(again)
        assert server.metric("prefix_cache_hits_total") == 2 * cached(again)
    with live(decoder, Limits(cache_megabytes=0), keys=["first"]) as server:
        assert [cached(ask("first")) for _ in range(2)] == [0, 0]


def test_pages_may_ask_from_origins_that_are_named(decoder: SpeculativeDecoder) -> None:
    asking = {"Origin": "http://good.example", "Access-Control-Request-Method": "POST"}
    with live(decoder, keys=["key"], origins=["http://good.example"]) as server:
        assert asked(server, "OPTIONS", CHAT, None, asking)[0] == 200
        assert asked(server, "OPTIONS", CHAT, None, {**asking, "Origin": "http://bad.example"})[0] == 400


def test_control_tokens_in_messages_stay_text() -> None:
    """They would end the turn, and begin one of the system's."""
    template = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}<turn>"
    decoder = made_decoder(chat_template=template, additional_special_tokens=["<turn>"])
    with live(decoder) as server:
        lengths = []
        for content in ("x", "x<turn>y"):
            told = [{"role": "user", "content": content}]
            answer = server.client().chat.completions.create(model="tiny", messages=told, max_tokens=1)
            lengths.append(answer.usage.prompt_tokens)
    assert lengths[1] - lengths[0] == len("<turn>y")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "LocalHost", "[::1]", "[::1]:80"])
def test_a_host_has_its_names_in_any_case(server: Live, host: str) -> None:
    assert asked(server, "GET", "/v1/models", headers={"Host": host})[0] == 200


def test_a_decoder_without_a_tokenizer_is_refused(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(InputError, match="with a tokenizer"):
        application(SpeculativeDecoder(decoder.target.model, drafts=[], compile=False))


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "prometheus_client"])
def test_a_missing_package_is_one_line(package: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Before models are loaded."""
    monkeypatch.setattr(sys, "argv", ["specinfer", "serve"])
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    line = f'specinfer: a server needs {package}: pip install "specinfer[serve]"\n'
    assert capsys.readouterr().err == line


def test_a_port_that_is_taken_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Before models are loaded: else clients that come meanwhile ask the other server."""
    monkeypatch.setattr(options.Models, "decoder", lambda *_, **__: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(sys, "argv", ["specinfer", "serve", "--port", str(port)])
        with pytest.raises(SystemExit) as end:
            cli.main()
    told = capsys.readouterr().err
    assert end.value.code == 2
    why = f"cannot listen on 127.0.0.1, port {port} (Address already in use)"
    assert told == f"specinfer: {why}: choose another --port, or 0 for a free one\n"


def test_strangers_need_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECINFER_API_KEY", raising=False)
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert Access().keys() == []
    assert Access(api_key_file=file, host="0.0.0.0").keys() == ["one", "two"]
    assert Access(host="0.0.0.0", insecure=True).keys() == []
    with pytest.raises(InputError, match="add --api-key-file FILE, or --insecure"):
        Access(host="0.0.0.0").keys()
    file.write_text("\n")
    with pytest.raises(InputError, match="holds no key"):
        Access(api_key_file=file).keys()
    monkeypatch.setenv("SPECINFER_API_KEY", "three")
    assert Access(host="0.0.0.0").keys() == ["three"]


def test_the_context_holds_for_whatever_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without positions counts the nodes of a tree, and a grammar's may be twice as large."""
    pytest.importorskip("llguidance")
    decoder = made_decoder()
    assert decoder.context == CONTEXT
    monkeypatch.setattr(decoder.target, "takes_positions", False)
    tokens = int(decoder.context) - 1
    assert decoder.prepare([5], max_new_tokens=tokens, regex="a*").row.remaining == tokens
    with pytest.raises(InputError, match="context"):
        decoder.prepare([5], max_new_tokens=tokens + 1, regex="a*")
