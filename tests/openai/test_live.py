"""Live calls through a gateway, driven by the official SDK against a stub upstream that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway_world import GatewayWorld, model, route

import openai
from stub_upstream import Say, StubUpstream, chunk, completion, sse

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def world(stub: StubUpstream, tmp_path: Path) -> Iterator[GatewayWorld]:
    models = (
        model("m", route("r0", stub.url)),
        model("renamed", route("r1", stub.url, upstream_model="inner/name")),
        model("keyed", route("r2", stub.url, api_key_env="UPSTREAM_KEY")),
        model("hurried", route("r3", stub.url, timeout_seconds=0.2)),
    )
    with GatewayWorld(tmp_path, *models, environ={"UPSTREAM_KEY": "sk-upstream-secret"}) as running:
        yield running


@pytest.fixture
def client(world: GatewayWorld) -> Iterator[openai.OpenAI]:
    with world.client() as made:
        yield made


def post(world: GatewayWorld, path: str, content: bytes, **headers: str) -> httpx2.Response:
    sent = {"Authorization": f"Bearer {world.key}", "Content-Type": "application/json", **headers}
    with httpx2.Client(trust_env=False) as plain:
        return plain.post(world.url + path, content=content, headers=sent, timeout=20)


# What passes


def test_chat_and_its_request_id(client: openai.OpenAI, stub: StubUpstream) -> None:
    answer = client.chat.completions.create(model="m", messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello there"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 15
    assert answer._request_id == stub.calls[0].headers["x-request-id"]


def test_a_body_travels_byte_by_byte(world: GatewayWorld, stub: StubUpstream) -> None:
    body = b'{ "model" : "m",\n "messages":[], "x_new": {"b":1.50, "a":[1e2, "\\u00e9\xc3\xa9"]}, "seed":  7 }'
    assert post(world, "/chat/completions", body).status_code == 200
    assert stub.calls[0].body == body


def test_only_the_model_changes_in_a_renamed_body(world: GatewayWorld, stub: StubUpstream) -> None:
    body = b'{"z": 1.50, "model": "renamed", "messages": [{"content": "x",  "role": "user"}], "t": 1e-9}'
    answer = post(world, "/chat/completions", body)
    assert (
        stub.calls[0].body == b'{"z":1.50,"model":"inner/name","messages":[{"content": "x",  "role": "user"}],"t":1e-9}'
    )
    assert answer.json()["model"] == "renamed"
    assert answer.json()["choices"] == completion("x")["choices"]


def test_priority_is_stripped_unless_allowed(tmp_path: Path, stub: StubUpstream) -> None:
    models = (
        model("plain", route("a", stub.url)),
        model("able", route("b", stub.url, kind="vllm", supports_priority=True)),
    )
    for allowed, expected in ((False, [None, None]), (True, [None, -5])):
        stub.calls.clear()
        with (
            GatewayWorld(tmp_path / str(allowed), *models, allow_client_priority=allowed) as world,
            world.client() as c,
        ):
            for name in ("plain", "able"):
                c.chat.completions.create(model=name, messages=MESSAGES, extra_body={"priority": -5, "other": 1})
        assert [body.get("priority") for body in stub.bodies()] == expected
        assert [body["other"] for body in stub.bodies()] == [1, 1]


def test_embeddings_pass_in_both_encodings(client: openai.OpenAI, stub: StubUpstream) -> None:
    found = client.embeddings.create(model="m", input=["a", "b"])
    assert [one.embedding for one in found.data] == [[0.5, -0.25]] * 2
    assert stub.bodies()[0]["encoding_format"] == "base64"
    assert client.embeddings.create(model="m", input="a", encoding_format="float").data[0].embedding == [0.5, -0.25]


def test_completions_and_responses_pass(client: openai.OpenAI, stub: StubUpstream) -> None:
    stub.say(Say(body={"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "t"}], "model": "m"}))
    assert client.completions.create(model="m", prompt="p").choices[0].text == "t"
    # A failed response is an answer: its error belongs to it.
    failed = {
        "id": "resp",
        "object": "response",
        "status": "failed",
        "error": {"code": "x", "message": "y"},
        "output": [],
    }
    stub.say(Say(body=failed))
    response = client.responses.create(model="m", input="p")
    assert (response.status, response.error and response.error.message) == ("failed", "y")
    assert [call.path for call in stub.calls] == ["/v1/completions", "/v1/responses"]


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["m", "renamed", "keyed", "hurried"]
    assert client.models.retrieve("renamed").id == "renamed"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("a/b")
    assert caught.value.code == "model_not_found"


def test_only_a_few_headers_go_upstream(world: GatewayWorld, stub: StubUpstream) -> None:
    body = json.dumps({"model": "keyed", "messages": []}).encode()
    post(
        world, "/chat/completions", body,
        **{"X-Request-Id": "mine-1", "Cookie": "a=b", "traceparent": "00-1-2-01", "X-Forwarded-For": "9.9.9.9",
           "Proxy-Authorization": "Basic x", "Connection": "keep-alive, x-hop", "x-hop": "1", "x-stainless-lang": "p"},
    )  # fmt: skip
    headers = stub.calls[0].headers
    assert headers["authorization"] == "Bearer sk-upstream-secret"
    assert headers["x-request-id"] == "mine-1"
    assert headers["traceparent"] == "00-1-2-01"
    assert headers["x-ringserve-traffic"] == "live"
    assert headers["accept-encoding"] == "identity"
    assert world.key not in repr(headers)
    unwanted = {"cookie", "x-forwarded-for", "proxy-authorization", "x-hop", "x-stainless-lang", "connection"}
    assert not unwanted & headers.keys()


def test_no_proxy_of_the_environment_is_used(
    client: openai.OpenAI, stub: StubUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    client.embeddings.create(model="m", input="a")
    assert len(stub.calls) == 1


# Streams


def test_a_stream_arrives_piece_by_piece(client: openai.OpenAI, stub: StubUpstream) -> None:
    hold = threading.Event()
    stub.say(Say(pieces=[sse(chunk("m", "a")), sse(chunk("m", "b")), b"data: [DONE]\n\n"], hold=hold,
                 content_type="text/event-stream"))  # fmt: skip
    with client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream:
        assert next(stream).choices[0].delta.content == "a"  # while the upstream still holds the rest
        hold.set()
        assert [one.choices[0].delta.content for one in stream] == ["b"]


def test_stream_headers_and_bytes(world: GatewayWorld, stub: StubUpstream) -> None:
    usage = {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 3}, "model": "m"}
    pieces = [b": keepalive\n\n", sse(chunk("m", "a")), sse(usage), b"data: [DONE]\n\n"]
    stub.say(Say(pieces=pieces, content_type="text/event-stream"))
    answer = post(world, "/chat/completions", b'{"model":"m","stream":true,"stream_options":{"include_usage":true}}')
    assert answer.content == b"".join(pieces)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-encoding" not in answer.headers
    assert answer.headers["x-request-id"].startswith("req_")
    assert stub.bodies()[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_a_renamed_stream_shows_the_public_name_only(world: GatewayWorld, stub: StubUpstream, size: int) -> None:
    text = 'the "model":"inner/name" of a text'
    whole = sse(chunk("inner/name", text)) + b'data: {"model" : "other \\"one"}\r\n\r\n' + b"data: [DONE]\n\n" + b"tail"
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    stub.say(Say(pieces=pieces, content_type="text/event-stream"))
    answer = post(world, "/chat/completions", b'{"model":"renamed","stream":true}')
    expected = whole.replace(b'"model": "inner/name"', b'"model": "renamed"').replace(
        b'"model" : "other \\"one"', b'"model" : "renamed"'
    )
    assert answer.content == expected
    assert text in json.loads(answer.text.partition("\n")[0].removeprefix("data: "))["choices"][0]["delta"]["content"]


@pytest.mark.parametrize("first", [b'data: {"half', sse(chunk("m", "a"))])
def test_a_failure_in_the_middle_becomes_the_last_event(world: GatewayWorld, stub: StubUpstream, first: bytes) -> None:
    stub.say(Say(pieces=[first], fault="cut", content_type="text/event-stream"))
    answer = post(world, "/chat/completions", b'{"model":"m","stream":true}')
    assert answer.status_code == 200
    events = [event for event in answer.text.split("\n\n") if event]
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "upstream_error"
    assert "[DONE]" not in answer.text
    assert len(stub.calls) == 1  # nothing is tried again after the first byte


def test_the_sdk_raises_on_a_failure_in_the_middle(client: openai.OpenAI, stub: StubUpstream) -> None:
    stub.say(Say(pieces=[sse(chunk("m", "a"))], fault="cut", content_type="text/event-stream"))
    with client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream:
        assert next(stream).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="closed the connection"):
            next(stream)


def test_an_answer_that_is_no_stream_is_passed_whole(client: openai.OpenAI, stub: StubUpstream) -> None:
    stub.say(Say(status=400, body={"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}}))
    with pytest.raises(openai.BadRequestError, match="no"):
        client.chat.completions.create(model="m", messages=MESSAGES, stream=True)


def test_a_client_that_leaves_cancels_the_upstream(world: GatewayWorld, stub: StubUpstream) -> None:
    hold = threading.Event()
    stub.say(Say(pieces=[sse(chunk("m", "a")), b"never"], hold=hold, content_type="text/event-stream"))
    with world.client() as client:
        stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        next(stream)
        assert world.route("r0").live == 1
        stream.close()
        stub.wait(lambda one: one.lost == 1)
    hold.set()


def test_a_client_that_leaves_before_the_answer_cancels_the_upstream(world: GatewayWorld, stub: StubUpstream) -> None:
    stub.say(Say(fault="silence"))
    body = b'{"model":"m","messages":[]}'
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + world.key.encode()
        + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )  # fmt: skip
    with socket.create_connection(("127.0.0.1", world.port)) as sock:
        sock.sendall(request)
        stub.wait(lambda one: one.in_flight == 1)
        assert world.route("r0").live == 1
    stub.wait(lambda one: one.lost == 1)
    # The upstream saw the end, so the call has been counted out or is just about to be.
    world.run(_settled(world))
    assert world.route("r0").live == 0


async def _settled(world: GatewayWorld) -> None:
    async with asyncio.timeout(30):
        while world.service.app._tasks:
            await asyncio.gather(*world.service.app._tasks, return_exceptions=True)


# What is refused here


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "invalid_json", None),
        (b"{not json", 400, "invalid_json", None),
        (b"[]", 400, "invalid_json", None),
        (b'{"model":"m"', 400, "invalid_json", None),
        (b'{"model":"m","x":"\xff"}', 400, "invalid_json", None),
        (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "invalid_json", None),
        (b"{}", 400, "missing_required_parameter", "model"),
        (b'{"model":null}', 400, "missing_required_parameter", "model"),
        (b'{"model":3}', 400, "invalid_type", "model"),
        (b'{"model":""}', 400, "invalid_value", "model"),
        (b'{"model":"m","stream":"yes"}', 400, "invalid_type", "stream"),
        (b'{"model":"other"}', 404, "model_not_found", "model"),
    ],
)
def test_bad_bodies_are_refused_and_nothing_is_sent(
    world: GatewayWorld, stub: StubUpstream, body: bytes, status: int, code: str, param: str | None
) -> None:
    answer = post(world, "/chat/completions", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert not stub.calls


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_its_limit_is_413(tmp_path: Path, stub: StubUpstream, chunked: bool) -> None:
    with GatewayWorld(tmp_path, model("m", route("r0", stub.url)), max_body_bytes=1000) as world:
        content: Any = b"x" * 1001
        if chunked:
            content = iter([b"x" * 600, b"x" * 600])
        answer = post(world, "/chat/completions", content)
        assert answer.status_code == 413
        assert "gateway.max_body_bytes = 1000" in answer.json()["error"]["message"]
        fine = b'{"model":"m","x":"' + b"x" * 900 + b'"}'
        assert post(world, "/chat/completions", fine).status_code == 200


def exchange(world: GatewayWorld, line: bytes, headers: bytes) -> tuple[bytes, bytes]:
    head, _, body = world.raw(line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers + b"\r\n").partition(
        b"\r\n\r\n"
    )
    return head, body


def test_the_two_error_shapes_of_one_port(world: GatewayWorld) -> None:
    """Protocols.md, must-have 10: 404, 405, 413 and what the server itself refuses, by prefix."""
    auth = f"Authorization: Bearer {world.key}\r\n".encode()
    large = b"Content-Length: 99999999999\r\n"
    for line, more, status in (
        (b"GET /v1/nothing", b"", 404),
        (b"GET /v1", b"", 404),
        (b"GET /v1/chat/completions", b"", 405),
        (b"DELETE /v1/models", b"", 405),
        (b"POST /v1/embeddings", large, 413),
        (b"POST /v1/embeddings", b"Transfer-Encoding: gzip\r\n", 501),
    ):
        head, _, body = world.raw(
            line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + auth + more + b"\r\n"
        ).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status), (line, head)
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, line
    for line, more, status in (
        (b"GET /v2/nothing", b"", 404),
        (b"PUT /v2", b"", 405),
        (b"POST /v2/models/x/infer", large, 413),
        (b"GET /V1/models", b"", 404),
        (b"GET //v1/models", b"", 404),
        (b"GET /%761/models", b"", 404),
        (b"GET /v1x/models", b"", 404),
    ):
        head, body = exchange(world, line, more)
        assert head.startswith(b"HTTP/1.1 %d" % status), (line, head)
        assert isinstance(json.loads(body)["error"], str), line


def test_a_header_of_the_client_cannot_forge_one_of_ours(world: GatewayWorld) -> None:
    answer = world.raw(b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Id: a b\r\n\r\n")
    assert b"a b" not in answer


def test_an_encoded_body_is_refused(world: GatewayWorld) -> None:
    assert post(world, "/chat/completions", b"x", **{"Content-Encoding": "gzip"}).status_code == 415
