"""A batch runner on a real store and real files, against a stub upstream that writes down what reaches it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from frontend.batches.keys import hash_key
from frontend.batches.local import LocalObjects
from frontend.batches.objects import object_path
from frontend.batches.runner.runner import BatchRunner
from frontend.batches.runner.timings import Timings
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.rows import BatchRow, NewBatch, NewFile, SchedulingRow, WrittenFile
from frontend.batches.store.sql_store import SqlStore
from frontend.batches.work_file import IndexBuilder
from frontend.gateway_settings import BatchSettings, GatewaySettings
from frontend.openai.calls import GatewayCall, Plan, Sent, UpstreamAnswer
from frontend.openai.errors import error_body
from store_world import World

QUICK = Timings(
    tick_s=0.02, pass_s=0.05, replan_s=0.2, unserved_s=0.0, heartbeat_s=0.2, publish_s=0.02, access_s=0.05,
    lease_s=60.0, renew_s=0.2, first_pause_s=0.1, retry_base_s=0.1, retry_jitter=0.0, outage_first_s=0.01,
    outage_longest_s=0.1,
)  # fmt: skip
"""Everything a tenth to a fiftieth of its real length."""
WORKSPACE = "ws_one"
KEY = "key_one"
END_S = 90.0
"""When a test is given up: far beyond what a busy machine takes."""


def ok(text: str = "hello") -> UpstreamAnswer:
    body = {"id": "x", "model": "m", "choices": [{"message": {"content": text}}], "usage": {"total_tokens": 15}}
    return UpstreamAnswer(200, json.dumps(body).encode(), "R", Sent.ANSWERED, "req_1")


def unsteady(real: Callable[..., Awaitable[Any]], rng: random.Random) -> Callable[..., Awaitable[Any]]:
    """Return a call of the store of which a third fails, half of these after taking effect."""

    async def call(*args: Any, **named: Any) -> Any:
        if rng.random() > 1 / 3:
            return await real(*args, **named)
        if rng.random() < 1 / 2:
            await real(*args, **named)
        raise StoreUnavailable("the connection broke")

    return call


def failed(status: int, sent: Sent = Sent.ANSWERED, retry_after_s: float | None = None) -> UpstreamAnswer:
    sent = Sent.DECLINED if status in (429, 503) and sent is Sent.ANSWERED else sent
    body = error_body(f"status {status}", "server_error", None, "stub")
    return UpstreamAnswer(status, body, "R", sent, "req_1", code="stub", retry_after_s=retry_after_s)


@dataclass(slots=True)
class Received:
    """One call as the upstream saw it."""

    text: str
    at_s: float
    call: GatewayCall


Answer = Callable[[str, int], UpstreamAnswer | Awaitable[UpstreamAnswer]]


@dataclass
class StubExecutor:
    """Provides ``Executor``: ``answer(text, nth)`` is asked for the nth call of a line's text."""

    answer: Answer = lambda text, nth: ok(text)
    routes: dict[str, str] = field(default_factory=lambda: {"m": "R"})
    cooling: set[str] = field(default_factory=set)
    calls: list[Received] = field(default_factory=list)
    now: int = 0
    most: int = 0
    reachable: Callable[[], bool] = lambda: True
    reaches: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    came: asyncio.Condition = field(default_factory=asyncio.Condition)

    def plan(self, endpoint: str, model: str) -> Plan:
        if model in self.cooling:
            return Plan("", 1.0)
        return Plan(self.routes.get(model, ""))

    async def reach(self, route: str) -> bool:
        self.reaches += 1
        return self.reachable()

    async def execute(self, call: GatewayCall) -> UpstreamAnswer:
        assert isinstance(call.body, bytes)
        text = json.loads(call.body)["messages"][0]["content"]
        self.counts[text] += 1
        self.now += 1
        self.most = max(self.most, self.now)
        self.calls.append(Received(text, time.monotonic(), call))
        async with self.came:
            self.came.notify_all()
        try:
            made = self.answer(text, self.counts[text])
            found = made if isinstance(made, UpstreamAnswer) else await made
            # A line that was never sent never reached anybody.
            if found.sent is Sent.NOT_SENT:
                self.calls.pop(next(i for i, c in enumerate(self.calls) if c.call is call))
            return replace(found, route=call.route or "")
        finally:
            self.now -= 1

    async def until(self, calls: int) -> None:
        """Wait until so many calls have come."""
        async with asyncio.timeout(END_S), self.came:
            await self.came.wait_for(lambda: len(self.calls) >= calls)

    @property
    def texts(self) -> list[str]:
        return [received.text for received in self.calls]


def line(index: int, model: str = "m", text: str = "", **changes: Any) -> bytes:
    """Return a line as the private copy holds it."""
    body = {"model": model, "messages": [{"role": "user", "content": text or f"t{index}"}]}
    value = {"custom_id": f"c{index}", "method": "POST", "url": "/v1/chat/completions", "body": body} | changes
    return json.dumps(value).encode()


@dataclass(slots=True)
class Results:
    """A batch that has ended, with its files by ``custom_id``."""

    batch: BatchRow
    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]

    @property
    def succeeded(self) -> list[str]:
        return [one["custom_id"] for one in self.output]

    @property
    def codes(self) -> dict[str, str]:
        """Error code (or HTTP status) by ``custom_id``."""
        return {
            one["custom_id"]: one["error"]["code"] if one["error"] else str(one["response"]["status_code"])
            for one in self.errors
        }


class RunnerWorld:
    """A store, its files, and batches in it."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.store = world.store
        self.directory = directory
        self.objects = LocalObjects(directory)
        self._batches = 0

    async def prepare(self) -> None:
        await self.objects.start()
        await self.store.keys.create_workspace(WORKSPACE, "one")
        await self.store.keys.create_key(KEY, WORKSPACE, "member", "k", "rs-1", "a" * 64)

    async def batch(
        self,
        lines: int | Sequence[bytes],
        *,
        workspace: str = WORKSPACE,
        key: str = KEY,
        model: str = "m",
        models: Sequence[str] | None = None,
        **changes: Any,
    ) -> BatchRow:
        """Create a batch with its private copy, as validation leaves it."""
        texts = [line(i, model) for i in range(lines)] if isinstance(lines, int) else list(lines)
        self._batches += 1
        number = self._batches
        batch_id = changes.pop("id", f"batch_{number:032x}")
        file_id = f"file-{number:032x}"
        index = IndexBuilder()
        writer = await self.objects.open_writer(object_path(file_id))
        for position, text in enumerate(texts):
            await writer.write(text + b"\n")
            index.add(text, models[position] if models else model)
        await writer.write(index.finish())
        written = await writer.commit()
        await self.store.files.insert(
            NewFile(file_id, workspace, "batch_input", None, "work", "x", object_path(file_id))
        )  # fmt: skip
        input_id = f"file-{number + (1 << 64):032x}"
        await self.store.files.insert(NewFile(input_id, workspace, "batch_input", "batch", "in", "x", "none"))
        await self.store.files.commit(WrittenFile(input_id, 1, "0" * 64))
        new = {
            "id": batch_id, "workspace_id": workspace, "api_key_id": key, "endpoint": "/v1/chat/completions",
            "public_model": model, "input_file_id": input_id,
            "work_file": WrittenFile(file_id, written.bytes, written.sha256),
            "completion_window_hours": 24, "retry_limit": 0, "request_total": len(texts),
        } | changes  # fmt: skip
        return (await self.store.batches.create(NewBatch(**new), active_limit=100_000))[0]

    async def workspace(self, name: str) -> tuple[str, str]:
        """Return a new workspace and a key of it."""
        await self.store.keys.create_workspace(f"ws_{name}", name)
        await self.store.keys.create_key(f"key_{name}", f"ws_{name}", "member", "k", "rs-1", hash_key(name))
        return f"ws_{name}", f"key_{name}"

    async def cap(self, route: str, lines: int) -> None:
        await self.store.scheduling.put_settings(SchedulingRow(route, max_concurrency=lines), None)

    def runner(
        self,
        executor: StubExecutor,
        *,
        store: SqlStore | None = None,
        times: Timings = QUICK,
        workers: int = 64,
        per_batch: int = 0,
        runner_id: str = "",
        default_cap: int = 64,
        **options: Any,
    ) -> BatchRunner:
        batches = BatchSettings(workers=workers, batch_concurrency=per_batch, default_max_concurrency=default_cap)
        settings = GatewaySettings(enabled=True, batches=batches)
        return BatchRunner(
            settings, store or self.store, self.objects, executor, times=times, runner_id=runner_id, **options
        )  # fmt: skip

    @asynccontextmanager
    async def running(self, executor: StubExecutor, **options: Any) -> AsyncIterator[BatchRunner]:
        runner = self.runner(executor, **options)
        async with AsyncExitStack() as stack:
            await runner.start()
            stack.push_async_callback(runner.close)
            yield runner

    async def ended(self, batch: BatchRow, timeout_s: float = END_S) -> Results:
        """Wait for the end of a batch and read its files."""
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    found = await self.store.batches.get(None, batch.id)
                except StoreUnavailable:
                    found = None
                if found is not None and found.settled_at is not None:
                    return await self.results(found)
                await asyncio.sleep(0.01)

    async def results(self, batch: BatchRow) -> Results:
        return Results(batch, await self._lines(batch.output_file_id), await self._lines(batch.error_file_id))

    async def waits(self, batch: BatchRow) -> dict[str, tuple[int, str | None, bool]]:
        """Return the published demand of a batch by route."""
        rows = await self.store.scheduling.fresh_waits()
        return {row.route_id: (row.waiting_lines, row.reason, row.ready) for row in rows if row.batch_id == batch.id}

    async def until_waiting(self, batch: BatchRow, route: str, expected: tuple[int, str | None, bool]) -> None:
        """Wait until a batch's published demand on a route is ``expected``."""
        found: tuple[int, str | None, bool] | None = None
        for _ in range(int(END_S / 0.01)):
            found = (await self.waits(batch)).get(route)
            if found == expected:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"waits for {found}, expected {expected}")

    async def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        file = await self.store.files.get_internal(file_id)
        assert file is not None and file.storage_path is not None
        data = await self.objects.read(file.storage_path, 0, file.bytes)
        assert data.endswith(b"\n") and file.api_purpose == "batch_output"
        return [json.loads(one) for one in data.decode().splitlines()]


def check(results: Results, executor: StubExecutor, lines: int) -> None:
    """Assert what must hold for every batch, however it went: no line twice, none lost, counts equal files."""
    listed = Counter(one["custom_id"] for one in [*results.output, *results.errors])
    assert set(listed.values()) <= {1}, "a line is listed twice"
    assert len(listed) == lines, "a line is missing"
    batch = results.batch
    assert batch.request_completed == len(results.output)
    never_ran = {"batch_cancelled", "batch_expired", "batch_failed"}
    ran = [one for one in results.errors if not (one["error"] and one["error"]["code"] in never_ran)]
    assert batch.request_failed == len(ran)
