"""Upstreams over TLS: the address is pinned, the name is what the certificate must prove, and nothing is looked up."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from gateway_world import GatewayWorld, model, route

import openai
from stub_upstream import StubUpstream

NAME = "gpu.example"


class SecureUpstream:
    """A stub behind a certificate for ``names``; notes the server names that clients ask for."""

    def __init__(self, authority: trustme.CA, *names: str) -> None:
        self.asked: list[str | None] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*names).configure_cert(context)
        context.sni_callback = self._note
        self.stub = StubUpstream(tls=context)

    def _note(self, _: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> None:
        self.asked.append(name)

    def url(self, host: str = NAME) -> str:
        return f"https://{host}:{self.stub.port}/v1"


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    found = trustme.CA()
    bundle = tmp_path / "authority.pem"
    found.cert_pem.write_to_path(str(bundle))
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    return found


@pytest.fixture
def secure(authority: trustme.CA) -> Iterator[SecureUpstream]:
    found = SecureUpstream(authority, NAME)
    with found.stub:
        yield found


def chat(world: GatewayWorld, name: str) -> str | None:
    with world.client() as client:
        made = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}])
        return made.choices[0].message.content


def refusal(world: GatewayWorld, name: str) -> dict[str, Any]:
    with pytest.raises(openai.APIStatusError) as caught:
        chat(world, name)
    error: dict[str, Any] = caught.value.response.json()["error"]
    return {"status": caught.value.status_code, **error}


def test_a_pinned_name_is_reached_and_proved(tmp_path: Path, secure: SecureUpstream) -> None:
    """``gpu.example`` exists nowhere: were it looked up, the call would fail."""
    routes = route("r", secure.url(), addresses=("127.0.0.1",))
    with GatewayWorld(tmp_path / "state", model("m", routes)) as world:
        assert chat(world, "m")
    assert secure.asked == [NAME]
    assert secure.stub.calls[0].headers["host"] == f"{NAME}:{secure.stub.port}"


def test_a_certificate_for_another_name_is_refused_before_anything_is_sent(
    tmp_path: Path, secure: SecureUpstream
) -> None:
    routes = route("r", secure.url("other.example"), addresses=("127.0.0.1",))
    with GatewayWorld(tmp_path / "state", model("m", routes)) as world:
        told = refusal(world, "m")
    assert (told["status"], told["code"]) == (502, "upstream_unreachable")
    assert "certificate" in told["message"]
    assert not secure.stub.calls


def test_a_certificate_of_a_stranger_is_refused(tmp_path: Path, authority: trustme.CA) -> None:
    stranger = SecureUpstream(trustme.CA(), NAME)
    with stranger.stub:
        routes = route("r", stranger.url(), addresses=("127.0.0.1",))
        with GatewayWorld(tmp_path / "state", model("m", routes)) as world:
            assert "certificate" in refusal(world, "m")["message"]
        assert not stranger.stub.calls


def test_a_public_name_that_leads_inside_leads_nowhere(tmp_path: Path, authority: trustme.CA) -> None:
    """Kind ``openai`` needs no addresses, so its name is looked up; what is not public is not connected to."""
    inside = SecureUpstream(authority, "localhost")
    with inside.stub:
        routes = route("r", inside.url("localhost"), kind="openai")
        with GatewayWorld(tmp_path / "state", model("m", routes)) as world:
            told = refusal(world, "m")
        assert (told["status"], told["code"]) == (502, "upstream_unreachable")
        assert "127.0.0.1" not in told["message"]
        assert not inside.asked and not inside.stub.calls
