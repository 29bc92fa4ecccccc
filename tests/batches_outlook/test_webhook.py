"""Messages to a webhook: what is sent, where it may go, and what counts as told."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trustme
from aiohttp import web

from frontend.batches.scheduling import webhook as webhook_file
from frontend.batches.scheduling.webhook import NotTold, Webhook, message, open_webhook, read_target, signature
from frontend.batches.store.route_rows import IncidentRow
from frontend.gateway_settings import WebhookSettings
from frontend.openai.addresses import NotApproved

INCIDENT = IncidentRow(
    "inc_1", "stalled", "batch_1", "ws_1", "Batch batch_1 has made no progress for 61 minutes",
    '{"kind": "batch_stalled", "total": 10}', opened_at=1_780_300_800_000_000, resolved_at=1_780_300_900_500_000,
)  # fmt: skip


@dataclass
class Receiver:
    """Answers with ``status``, not while ``silent``, and keeps what came."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    silent: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    port: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.got.append((request.path_qs, dict(request.headers), await request.read()))
        if self.silent:
            await self.over.wait()
        return web.Response(status=self.status, headers=self.headers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook/very-secret?x=%2F"


@asynccontextmanager
async def receiving(receiver: Receiver) -> AsyncIterator[Receiver]:
    async with _served(receiver, None):
        yield receiver


@asynccontextmanager
async def _served(receiver: Receiver, context: ssl.SSLContext | None) -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", receiver.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    receiver.port = runner.addresses[0][1]
    try:
        yield
    finally:
        receiver.over.set()
        await runner.cleanup()


@asynccontextmanager
async def opened(url: str, secret: str = "k") -> AsyncIterator[Webhook]:
    made = open_webhook(WebhookSettings(url=url, secret_env="HOOK"), {"HOOK": secret}, development=True)
    assert made is not None
    await made.start()
    try:
        yield made
    finally:
        await made.close()
        await made.close()


def test_a_message_is_signed_over_time_and_body_and_says_what_happened() -> None:
    async def scenario() -> None:
        async with receiving(Receiver()) as receiver, opened(receiver.url, "the key") as hook:
            await hook.tell(INCIDENT, "opened", 1_780_300_801)
            ((path, headers, body),) = receiver.got
            assert path == "/hook/very-secret?x=%2F"
            expected = hmac.new(b"the key", b"1780300801." + body, hashlib.sha256).hexdigest()
            assert headers["Ringserve-Signature"] == "v1=" + expected
            assert headers["Ringserve-Timestamp"] == "1780300801"
            assert headers["Ringserve-Event"] == "inc_1.opened"
            assert not {"Authorization", "Cookie"} & headers.keys()
            assert json.loads(body) == {
                "id": "inc_1", "event": "opened", "rule": "stalled", "kind": "batch_stalled", "batch": "batch_1",
                "workspace": "ws_1", "summary": INCIDENT.summary,
                "details": {"kind": "batch_stalled", "total": 10},
                "opened_at": 1_780_300_800, "resolved_at": 1_780_300_900,
            }  # fmt: skip

    asyncio.run(scenario())


def test_another_time_body_or_secret_has_another_signature() -> None:
    body = message(INCIDENT, "opened")
    signed = signature(b"k", 1, body)
    assert signed == signature(b"k", 1, body)
    assert len({signed, signature(b"k", 2, body), signature(b"q", 1, body), signature(b"k", 1, body + b" ")}) == 4
    assert signature(b"k", 1, b"2.x") != signature(b"k", 12, b".x")


@pytest.mark.parametrize(
    ("status", "reached"), [(301, True), (400, True), (404, True), (429, False), (500, False), (503, False)]
)
def test_anything_but_2xx_is_not_told_and_redirects_are_not_followed(status: int, reached: bool) -> None:
    async def scenario() -> None:
        receiver = Receiver(status, {"Location": "/elsewhere"})
        async with receiving(receiver), opened(receiver.url) as hook:
            with pytest.raises(NotTold) as refused:
                await hook.tell(INCIDENT, "opened", 1)
            assert refused.value.reached == reached
            assert "secret" not in str(refused.value)
            assert len(receiver.got) == 1

    asyncio.run(scenario())


def test_silence_ends_at_the_deadline_and_nobody_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_file, "DEADLINE_S", 0.05)

    async def scenario() -> None:
        receiver = Receiver(silent=True)
        async with receiving(receiver), opened(receiver.url) as hook:
            with pytest.raises(NotTold, match="no answer within") as late:
                await hook.tell(INCIDENT, "opened", 1)
            assert not late.value.reached
        async with opened(receiver.url) as hook:
            with pytest.raises(NotTold, match="cannot be reached") as gone:
                await hook.tell(INCIDENT, "opened", 1)
            assert not gone.value.reached
            assert "secret" not in str(gone.value)

    asyncio.run(scenario())


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with receiving(Receiver()) as proxy, receiving(Receiver()) as receiver:
            for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            async with opened(receiver.url) as hook:
                await hook.tell(INCIDENT, "opened", 1)
            assert (len(receiver.got), len(proxy.got)) == (1, 0)

    asyncio.run(scenario())


def test_a_name_goes_to_its_pinned_addresses_only() -> None:
    async def scenario() -> None:
        async with receiving(Receiver()) as receiver:
            settings = WebhookSettings(
                url=f"http://hooks.example:{receiver.port}/in", addresses=("127.0.0.1",), secret_env="HOOK"
            )
            hook = open_webhook(settings, {"HOOK": "k"}, development=True)
            assert hook is not None
            await hook.start()
            await hook.tell(INCIDENT, "opened", 1)
            await hook.close()
            assert receiver.got[0][1]["Host"] == f"hooks.example:{receiver.port}"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("https://169.254.169.254/latest", ()),
        ("https://169.254.169.254/latest", ("10.0.0.1",)),
        ("https://[fd00:ec2::254]/latest", ()),
        ("https://[::ffff:169.254.169.254]/x", ()),
        ("https://2130706433/x", ()),
        ("https://127.0.0.1/x", ()),
        ("https://hooks.example/x", ("127.0.0.1",)),
        ("https://hooks.example/x", ("0.0.0.0",)),
        ("http://hooks.example/x", ()),
        ("http://hooks.example/x", ("93.184.216.34",)),
        ("https://user:word@hooks.example/x", ("93.184.216.34",)),
        ("ftp://hooks.example/x", ("10.0.0.1",)),
        ("https:///x", ()),
    ],
)
def test_where_no_message_may_go(url: str, addresses: tuple[str, ...]) -> None:
    with pytest.raises(NotApproved):
        read_target(WebhookSettings(url=url, addresses=addresses, secret_env="HOOK"), development=False)


def test_where_messages_may_go() -> None:
    for url, addresses, expected in (
        ("https://hooks.example/x", (), ()),
        ("https://hooks.example:8443/x", ("93.184.216.34",), ("93.184.216.34",)),
        ("http://hooks.internal:8080/x", ("10.0.0.5",), ("10.0.0.5",)),
        ("http://10.0.0.5:8080/x", (), ("10.0.0.5",)),
    ):
        target = read_target(WebhookSettings(url=url, addresses=addresses), development=False)
        assert target.addresses == expected


def test_without_a_secret_nothing_is_sent_and_without_a_url_there_is_nothing() -> None:
    with pytest.raises(NotApproved, match="HOOK"):
        open_webhook(WebhookSettings(url="https://hooks.example/x", secret_env="HOOK"), {}, development=False)
    assert open_webhook(WebhookSettings(), {}, development=False) is None


@asynccontextmanager
async def receiving_tls(receiver: Receiver, authority: trustme.CA, name: str) -> AsyncIterator[Receiver]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    async with _served(receiver, context):
        yield receiver


@pytest.mark.parametrize(("certified", "told"), [("hooks.example", True), ("other.example", False)])
def test_a_pinned_name_must_prove_itself_over_tls(
    certified: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))

    async def scenario() -> None:
        async with receiving_tls(Receiver(), authority, certified) as receiver:
            url = f"https://hooks.example:{receiver.port}/in"
            settings = WebhookSettings(url=url, addresses=("127.0.0.1",), secret_env="HOOK")
            hook = open_webhook(settings, {"HOOK": "k"}, development=True)
            assert hook is not None
            await hook.start()
            try:
                if told:
                    await hook.tell(INCIDENT, "opened", 1)
                else:
                    with pytest.raises(NotTold, match="cannot be reached"):
                        await hook.tell(INCIDENT, "opened", 1)
            finally:
                await hook.close()
            assert len(receiver.got) == int(told)

    asyncio.run(scenario())
