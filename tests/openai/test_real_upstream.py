"""A real llama.cpp server behind the gateway: chat, streams, errors, and a client that leaves."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_world import GatewayWorld, model, route

import openai
from llama_server import LlamaServer
from real_node import until

pytestmark = pytest.mark.process
GENERATION_S = 120.0
"""A real model on a machine that does other things as well."""
MESSAGES: Any = [{"role": "user", "content": "Say one short sentence about the sea."}]


@pytest.fixture
def world(llama: LlamaServer, tmp_path: Path) -> Iterator[GatewayWorld]:
    smol = route("smol0", llama.url, upstream_model="inner-smol")
    with GatewayWorld(tmp_path, model("smol", smol)) as running:
        yield running


@pytest.fixture
def client(world: GatewayWorld) -> Iterator[openai.OpenAI]:
    with world.client(timeout=GENERATION_S) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smol", messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 12


def test_a_stream_says_the_same_as_one_answer_and_ends_with_usage(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smol", "messages": MESSAGES, "max_tokens": 12, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    options: Any = {"include_usage": True}
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert said == whole
    assert len(pieces) > 5
    assert pieces[-1].choices == []
    assert pieces[-1].usage is not None
    assert {piece.model for piece in pieces} == {"smol"}


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smol", prompt="One, two, three,", max_tokens=5, temperature=0)
    assert answer.choices[0].text


def test_its_errors_have_our_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model="smol", input="embeddings are off there")
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="smol", messages="no list")  # type: ignore[call-overload]


def test_a_client_that_leaves_frees_the_slot(client: openai.OpenAI, llama: LlamaServer) -> None:
    stream = client.chat.completions.create(
        model="smol", messages=MESSAGES, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    assert processing(llama) == 1
    stream.close()
    until("the slot is free", lambda: processing(llama) == 0)


def processing(llama: LlamaServer) -> int:
    with urllib.request.urlopen(llama.url.removesuffix("/v1") + "/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("llamacpp:requests_processing"):
                return int(float(line.split()[-1]))
    raise AssertionError("no such figure")
