"""The reader of metrics against a real server that does everything wrong, one thing at a time."""

from __future__ import annotations

import asyncio
import gzip
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from metrics_server import (
    GOOD,
    Answer,
    MetricsServer,
    cut,
    endless,
    gzipped,
    hang_up,
    page,
    reset,
    silence,
    silence_after_the_head,
    sized,
    trickle,
)

from frontend.batches.scheduling import metrics_reader
from frontend.batches.scheduling.load_limits import ReadError, Reading
from frontend.batches.scheduling.metrics_reader import (
    DEADLINE_S,
    HELD_S,
    MAX_PAGE_BYTES,
    MetricsReader,
    approved_endpoints,
    approved_urls,
)
from frontend.gateway_settings import GatewayModel, GatewaySettings, RouteSettings
from frontend.openai.addresses import Endpoint, read_endpoint
from stub_upstream import StubUpstream

SECOND_NS = 10**9


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer() as running:
        yield running


class Clock:
    """Both clocks, moved by hand."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * SECOND_NS
        self.now_us = 1_792_918_800_000_000

    def pass_(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        self.now_us += int(seconds * 1e6)


@asynccontextmanager
async def reading_from(*endpoints: Endpoint, **options: Any) -> AsyncIterator[MetricsReader]:
    reader = MetricsReader(endpoints, **options)
    await reader.start()
    try:
        yield reader
    finally:
        await reader.close()


def approved(server: MetricsServer) -> Endpoint:
    return read_endpoint(server.url, [], development=True)


def has_been_asked(server: StubUpstream) -> bool:
    return len(server.calls) > 0


def once(server: MetricsServer, answer: Answer) -> Reading:
    """Return what one fetch comes to."""
    server.answer = answer

    async def run() -> Reading:
        async with reading_from(approved(server)) as reader:
            return await reader.read(server.metrics_url)

    return asyncio.run(run())


def test_a_good_page(server: MetricsServer) -> None:
    reading = once(server, page(GOOD))
    assert (reading.error, reading.waiting, reading.running, reading.kv_cache_permille) == (None, 3, 1, 200)
    (head,) = server.heads
    assert head.startswith("get /metrics http/1.1\r\n")
    assert "\r\naccept: text/plain\r\n" in head and "\r\naccept-encoding: identity\r\n" in head
    assert f"\r\nhost: 127.0.0.1:{server.port}\r\n" in head


FAULTS: list[tuple[str, Answer, ReadError]] = [
    ("404", page(b"", 404), ReadError.HTTP_STATUS),
    ("500 with a page", page(GOOD, 500), ReadError.HTTP_STATUS),
    ("204", b"HTTP/1.1 204 X\r\n\r\n", ReadError.HTTP_STATUS),
    ("206", page(GOOD, 206), ReadError.HTTP_STATUS),
    ("one byte too many", page(sized(MAX_PAGE_BYTES + 1)), ReadError.TOO_LARGE),
    ("endless", endless, ReadError.TOO_LARGE),
    ("one byte too many, compressed", gzipped(sized(MAX_PAGE_BYTES + 1)), ReadError.TOO_LARGE),
    ("a bomb", gzipped(b"\0" * (256 * MAX_PAGE_BYTES)), ReadError.TOO_LARGE),
    ("much behind a small page", page(gzip.compress(GOOD) + b"x" * (2 * MAX_PAGE_BYTES), 200, "Content-Encoding: gzip"),
     ReadError.TOO_LARGE),
    ("0xff", page(GOOD + b"\xff"), ReadError.INVALID_BODY),
    ("0xff, compressed", gzipped(GOOD + b"\xff"), ReadError.INVALID_BODY),
    ("0xff in a page that is parsed on a thread", page(sized(100_000) + b"\xff"), ReadError.INVALID_BODY),
    ("not compressed although it says so", page(GOOD, 200, "Content-Encoding: gzip"), ReadError.INVALID_BODY),
    ("compressed and cut short", page(gzip.compress(GOOD)[:-9], 200, "Content-Encoding: gzip"), ReadError.INVALID_BODY),
    ("compressed in an unknown way", page(GOOD, 200, "Content-Encoding: br"), ReadError.INVALID_BODY),
    ("no HTTP", b"\x16\x03 this is not HTTP\r\n\r\n", ReadError.INVALID_BODY),
    ("an endless head", b"HTTP/1.1 200 X\r\nA: " + b"x" * 1_000_000 + b"\r\n\r\n", ReadError.INVALID_BODY),
    ("closed at once", hang_up, ReadError.UNREACHABLE),
    ("reset", reset, ReadError.UNREACHABLE),
    ("closed in the middle", cut, ReadError.UNREACHABLE),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "error"), [row[1:] for row in FAULTS], ids=[row[0] for row in FAULTS])
def test_acceptance_10_faults(server: MetricsServer, answer: Answer, error: ReadError) -> None:
    reading = once(server, answer)
    assert reading.error == error
    assert (reading.waiting, reading.running, reading.kv_cache_permille) == (None, None, None)
    assert len(server.heads) == 1, "nothing is tried again"


@pytest.mark.parametrize(
    ("answer", "waiting"),
    [
        (page(sized(MAX_PAGE_BYTES)), 3),
        (gzipped(sized(MAX_PAGE_BYTES)), 3),
        (page(zlib.compress(GOOD), 200, "Content-Encoding: deflate"), 3),
        (page(GOOD, 200, "Content-Encoding: identity"), 3),
        (page(b""), None),
        (page(b"<html>not what you are looking for</html>"), None),
    ],
    ids=["1 MiB", "1 MiB, compressed", "deflate", "identity", "empty", "html"],
)
def test_pages_that_can_be_read(server: MetricsServer, answer: bytes, waiting: int | None) -> None:
    reading = once(server, answer)
    assert (reading.error, reading.waiting) == (None, waiting)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_acceptance_10_redirects_are_not_followed(server: MetricsServer, status: int) -> None:
    with MetricsServer() as target:
        assert once(server, page(b"", status, f"Location: {target.metrics_url}")).error == ReadError.HTTP_STATUS
        assert target.heads == []


@pytest.mark.parametrize("answer", [silence, silence_after_the_head, trickle], ids=lambda answer: answer.__name__)
def test_acceptance_10_one_deadline_for_everything(server: MetricsServer, answer: Answer) -> None:
    server.answer = answer

    async def run() -> tuple[Reading, float]:
        loop = asyncio.get_running_loop()
        async with reading_from(approved(server)) as reader:
            began = loop.time()
            reading = await reader.read(server.metrics_url)
            return reading, loop.time() - began

    reading, took_s = asyncio.run(run())
    assert reading.error == ReadError.TIMEOUT
    # Not before its time; how much later depends on the machine, and nothing but the deadline can have ended it.
    assert took_s >= DEADLINE_S - 0.05
    assert DEADLINE_S == 2.0


def test_acceptance_10_a_refused_connection(server: MetricsServer) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"

        async def run() -> Reading:
            async with reading_from(read_endpoint(base, [], development=True)) as reader:
                return await reader.read(base.removesuffix("/v1") + "/metrics")

        assert asyncio.run(run()).error == ReadError.UNREACHABLE


def test_acceptance_10_no_proxy_and_no_credentials(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    netrc.chmod(0o600)
    with MetricsServer() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            monkeypatch.setenv(name.lower(), f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("NETRC", str(netrc))
        assert once(server, page(GOOD, 200, "Set-Cookie: a=b")).error is None
        assert once(server, page(GOOD)).error is None
        assert proxy.heads == []
    assert len(server.heads) == 2
    assert not any(name in head for head in server.heads for name in ("authorization", "cookie", "proxy-"))


def test_a_cookie_is_not_kept(server: MetricsServer) -> None:
    server.answer = page(GOOD, 200, "Set-Cookie: a=b; Path=/")

    async def run() -> None:
        async with reading_from(approved(server), held_s=0.0) as reader:
            for _ in range(3):
                await reader.read(server.metrics_url)

    asyncio.run(run())
    assert len(server.heads) == 3
    assert not any("cookie" in head for head in server.heads)


# Approval and addresses


def test_rule_25_what_is_not_approved_is_not_asked(server: MetricsServer) -> None:
    async def run() -> list[ReadError | None]:
        async with reading_from(approved(server)) as reader:
            urls = [
                server.metrics_url + "?x=1",
                server.url,
                f"http://localhost:{server.port}/metrics",
                "http://10.0.0.9/metrics",
                "",
            ]
            errors = [(await reader.read(url)).error for url in urls]
            return errors + [getattr(reader.reading(url), "error", None) for url in urls]

    assert asyncio.run(run()) == [ReadError.NOT_APPROVED] * 10
    assert server.heads == []


def test_rule_26_connections_go_to_the_pinned_address(server: MetricsServer) -> None:
    """The name is in no name service, and the address that is pinned for it answers."""
    endpoint = read_endpoint(f"http://gpu.invalid:{server.port}/vllm/v1", ["127.0.0.1"], development=True)

    async def run() -> Reading:
        async with reading_from(endpoint) as reader:
            return await reader.read(f"http://gpu.invalid:{server.port}/vllm/metrics")

    assert asyncio.run(run()).error is None
    assert server.heads[0].startswith("get /vllm/metrics ")
    assert f"\r\nhost: gpu.invalid:{server.port}\r\n" in server.heads[0]


def test_rule_26_a_name_leads_nowhere_but_to_its_pins(server: MetricsServer) -> None:
    """``localhost`` would resolve to where the server is; its pin is another address of this machine."""
    endpoint = read_endpoint(f"http://localhost:{server.port}/v1", ["127.0.0.99"], development=True)

    async def run() -> Reading:
        async with reading_from(endpoint) as reader:
            return await reader.read(f"http://localhost:{server.port}/metrics")

    assert asyncio.run(run()).error == ReadError.UNREACHABLE
    assert server.heads == []


def test_which_endpoints_of_a_node_are_approved() -> None:
    routes = (
        RouteSettings(id="a", kind="vllm", endpoint="http://10.0.0.5:8000/v1", addresses=("10.0.0.5",)),
        RouteSettings(id="b", kind="local"),
        RouteSettings(id="c", kind="openai"),
        RouteSettings(id="d", kind="openai_compatible", endpoint="https://p.example/x/v1", addresses=("203.0.113.7",)),
    )
    endpoints = approved_endpoints(GatewaySettings(models=(GatewayModel(name="m", routes=routes),)))
    assert sorted(approved_urls(endpoints)) == ["http://10.0.0.5:8000/metrics", "https://p.example/x/metrics"]


# Sharing and holding


def test_acceptance_10_ten_asks_are_one_fetch(server: MetricsServer) -> None:
    async def run() -> list[Reading]:
        async with reading_from(approved(server)) as reader:
            return list(await asyncio.gather(*(reader.read(server.metrics_url) for _ in range(10))))

    readings = asyncio.run(run())
    assert len(server.heads) == 1
    assert all(reading is readings[0] for reading in readings)


@pytest.mark.parametrize("answer", [page(GOOD), page(b"", 500)], ids=["good", "bad"])
def test_acceptance_10_a_result_holds_for_five_seconds(server: MetricsServer, answer: bytes) -> None:
    clock = Clock()
    server.answer = answer

    async def run() -> list[int]:
        options = {"clock_ns": lambda: clock.now_ns, "clock_us": lambda: clock.now_us}
        async with reading_from(approved(server), **options) as reader:
            counts = []
            for seconds in (0.0, 4.9, 0.2, 4.9):
                clock.pass_(seconds)
                await reader.read(server.metrics_url)
                counts.append(len(server.heads))
            return counts

    assert asyncio.run(run()) == [1, 1, 2, 2]
    assert HELD_S == 5.0


def test_reading_never_waits_and_tells_when_there_is_news(server: MetricsServer) -> None:
    clock = Clock()

    async def run() -> None:
        news: asyncio.Queue[str] = asyncio.Queue()
        options = {"clock_ns": lambda: clock.now_ns, "clock_us": lambda: clock.now_us, "on_reading": news.put_nowait}
        async with reading_from(approved(server), **options) as reader:
            assert reader.reading(server.metrics_url) is None
            assert reader.reading(server.metrics_url) is None
            assert await news.get() == server.metrics_url
            first = reader.reading(server.metrics_url)
            assert first is not None and first.waiting == 3
            assert first.checked_at_us == clock.now_us

            clock.pass_(5.1)
            server.answer = page(b"vllm:num_requests_waiting 4\n")
            assert reader.reading(server.metrics_url) is first, "while it is being renewed"
            await news.get()
            second = reader.reading(server.metrics_url)
            assert second is not None and second.waiting == 4

            clock.pass_(HELD_S + DEADLINE_S + 0.1)
            assert reader.reading(server.metrics_url) is None, "nobody has asked for long: it says nothing of now"
            await news.get()
            assert reader.reading(server.metrics_url) is not None
        assert len(server.heads) == 3

    asyncio.run(run())


def test_an_asker_that_gives_up_leaves_the_fetch_to_the_others(server: MetricsServer) -> None:
    released = asyncio.Event()

    async def late(writer: Any) -> None:
        await released.wait()
        writer.write(page(GOOD))

    server.answer = late

    async def run() -> Reading:
        async with reading_from(approved(server)) as reader:
            first, second = (asyncio.create_task(reader.read(server.metrics_url)) for _ in range(2))
            await asyncio.to_thread(server.wait, has_been_asked)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            server._loop.call_soon_threadsafe(released.set)
            return await second

    assert asyncio.run(run()).error is None
    assert len(server.heads) == 1


def test_bg_07_a_slow_server_holds_up_neither_the_loop_nor_other_servers(server: MetricsServer) -> None:
    server.answer = silence

    async def run() -> None:
        with MetricsServer() as other:
            async with reading_from(approved(server), approved(other)) as reader:
                slow = asyncio.create_task(reader.read(server.metrics_url))
                await asyncio.to_thread(server.wait, has_been_asked)
                assert (await reader.read(other.metrics_url)).error is None
                assert reader.reading(server.metrics_url) is None
                assert not slow.done()
            await asyncio.gather(slow, return_exceptions=True)

    asyncio.run(run())


def test_closing_ends_what_is_being_read(server: MetricsServer) -> None:
    server.answer = silence

    async def run() -> asyncio.Task[Reading]:
        async with reading_from(approved(server)) as reader:
            asked = asyncio.create_task(reader.read(server.metrics_url))
            await asyncio.to_thread(server.wait, has_been_asked)
        await asyncio.gather(asked, return_exceptions=True)
        await reader.close()
        return asked

    assert asyncio.run(run()).cancelled()


def test_bg_13_a_clock_that_steps_changes_no_age(server: MetricsServer) -> None:
    clock = Clock()

    async def run() -> None:
        options = {"clock_ns": lambda: clock.now_ns, "clock_us": lambda: clock.now_us}
        async with reading_from(approved(server), **options) as reader:
            first = await reader.read(server.metrics_url)
            for step_s in (-90, 3600, -86_400):
                clock.now_us += step_s * 1_000_000
                assert await reader.read(server.metrics_url) is first
            clock.now_ns += 6 * SECOND_NS
            second = await reader.read(server.metrics_url)
            assert second is not first and second.checked_at_us == clock.now_us

    asyncio.run(run())
    assert len(server.heads) == 2


def test_bg_19_a_gauge_that_is_renamed_while_we_run(server: MetricsServer) -> None:
    names = ["gpu_cache_usage_perc", "kv_cache_usage_perc", "cache_use"]

    async def run() -> list[int | None]:
        async with reading_from(approved(server), held_s=0.0) as reader:
            found = []
            for name in names:
                server.answer = page(f"vllm:{name} 0.5\n".encode())
                found.append((await reader.read(server.metrics_url)).kv_cache_permille)
            return found

    assert asyncio.run(run()) == [500, 500, None]


def test_large_pages_are_parsed_beside_the_loop(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Callable[..., Any]] = []
    real = asyncio.to_thread

    async def noting(function: Callable[..., Any], *values: Any) -> Any:
        threads.append(function)
        return await real(function, *values)

    monkeypatch.setattr(metrics_reader.asyncio, "to_thread", noting)
    assert once(server, page(sized(60_000))).error is None
    assert threads == []
    assert once(server, page(sized(70_000))).waiting == 3
    assert len(threads) == 1
