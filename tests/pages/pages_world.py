"""A gateway with its pages on a real port, real store and HTTP server, and a scene of routes and batches to look at."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop

from frontend.batches.keys import make_key
from frontend.batches.store.route_rows import EdgeRow, IncidentRow, MinuteRow, SignalRow
from frontend.batches.store.rows import BatchRow, Demand, SchedulingRow, WrittenFile
from frontend.dispatcher import Dispatcher
from frontend.gateway_settings import GatewayModel, GatewaySettings, RouteSettings
from frontend.http import HttpServer
from frontend.kserve.http_routes import KserveApp
from frontend.openai.service import GatewayService
from frontend.settings import EndpointSettings
from store_world import World

sys.path.insert(0, str(Path(__file__).parents[1] / "kserve"))
from serving_double import DoubleServing

T = TypeVar("T")
WAIT_S: Final = 30.0
MINUTE_US: Final = 60_000_000
HOUR_US: Final = 60 * MINUTE_US
RESEARCH, SALES, HOME, BULK = "research", "sales", "home-ana", "home-bulk"
BASE: Final = "http://10.0.0.5:8000"
MODELS: Final = (
    GatewayModel(
        name="llama-70b",
        routes=(
            RouteSettings(id="gpu-a", kind="vllm", endpoint=f"{BASE}/v1", addresses=("10.0.0.5",)),
            RouteSettings(id="gpu-b", kind="vllm", endpoint="http://10.0.0.6:8000/v1", addresses=("10.0.0.6",)),
        ),
    ),
    GatewayModel(
        name="gpt-small",
        routes=(RouteSettings(id="cloud", kind="openai"), RouteSettings(id="spare", kind="openai")),
    ),
    GatewayModel(name="minilm", routes=(RouteSettings(id="own", kind="local"),)),
)
EXAMPLE: Final = SchedulingRow(
    "gpu-a", max_concurrency=4, yield_live_threshold=2, metrics_url=f"{BASE}/metrics", metrics_max_waiting=0,
    metrics_max_kv_cache_percent=90, priority=10, window_timezone="America/New_York", window_days=0b11111,
    window_start_minute=19 * 60, window_end_minute=7 * 60,
)  # fmt: skip
"""The example of the guide to batch scheduling."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A key and whose it is."""

    id: str
    secret: str


class PagesWorld:
    """Attributes: ``service`` lives on a thread of its own; ``data`` writes to its store as another process would."""

    def __init__(self, state_dir: Path, **settings: Any) -> None:
        self.settings = GatewaySettings(enabled=True, models=MODELS, state_dir=str(state_dir), **settings)
        self.port = 0
        self.keys: dict[str, Holder] = {}
        self.service: GatewayService
        self.data: World
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: HttpServer
        self._waits: dict[str, list[Demand]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/ui"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the gateway's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())
        self.data = World("sqlite", str(Path(self.settings.state_dir) / "store.sqlite3"))
        for name, kind in ((RESEARCH, "team"), (SALES, "team"), (HOME, "personal"), (BULK, "personal")):
            self.run(self.service.door.store.keys.create_workspace(f"ws_{name}", name, kind))  # type: ignore[arg-type]
        for name, role, workspace in (
            ("ana", "platform_admin", RESEARCH),
            ("audit", "auditor", RESEARCH),
            ("lead", "workspace_admin", RESEARCH),
            ("notebook", "member", RESEARCH),
            ("pipeline", "member", RESEARCH),
            ("crm", "member", SALES),
            ("hobby", "member", HOME),
            ("bulk", "member", BULK),
        ):
            self.keys[name] = self.new_key(name, role, workspace)

    def stop(self) -> None:
        self.data.close()
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def new_key(self, name: str, role: Any, workspace: str) -> Holder:
        made = make_key()
        keys = self.service.door.store.keys
        self.run(keys.create_key(made.id, f"ws_{workspace}", role, name, made.prefix, made.key_hash))
        return Holder(made.id, made.secret)

    async def _start(self) -> None:
        limits = EndpointSettings()
        serving = DoubleServing(limits)
        self.service = GatewayService(self.settings, serving, {})
        await self.service.start()
        await self.service.door.opened.wait()
        app = Dispatcher(self.service.applications(), KserveApp(serving))
        self._server = HttpServer(app, "127.0.0.1", 0, limits)
        self.port = await self._server.start()

    async def _stop(self) -> None:
        await self._server.close()
        await self.service.close()

    # Filling

    def batch(self, key: str, lines: int, workspace: str = RESEARCH, **changes: Any) -> BatchRow:
        """Create a batch of a key."""
        batch_id = "batch_" + secrets.token_hex(16)
        return self.data.batch(f"ws_{workspace}", lines, batch_id, api_key_id=self.keys[key].id, **changes)

    def begin(self, *batches: BatchRow) -> None:
        """Let a runner have every batch there is, and begin these."""
        self.data.run(self.data.store.runner.take("r1", 3600 * 1_000_000, 1000))
        for batch in batches:
            assert self.data.run(self.data.store.runner.begin("r1", batch.id))

    def progress(self, batch: BatchRow, done: int, failed: int, running: int, route: str = "gpu-a") -> None:
        """Finish the first lines of a batch, leave some running."""
        self.data.claim(batch, range(done + failed + running), cap=1000, route=route, waiting=batch.request_total)
        for line in range(done + failed):
            self.data.finish(batch, line, ok=line >= failed)
        self.data.run(self.data.store.scheduling.publish_waits("r1", batch.id, [], legitimate=True))

    def wait_for(self, batch: BatchRow, *demands: Demand) -> None:
        """Say what a batch waits for; it stays said until it says something else."""
        self._waits[batch.id] = list(demands)
        self.publish()

    def publish(self) -> None:
        """Say again what batches wait for: it is believed for ten seconds."""
        for batch_id, demands in self._waits.items():
            self.data.run(self.data.store.scheduling.publish_waits("r1", batch_id, demands, legitimate=True))

    def end(self, batch: BatchRow, state: Any = "completed", **more: Any) -> None:
        """Finish a batch without running lines."""
        runner = self.data.store.runner
        self.data.run(runner.mark_finalizing("r1", batch.id, output_id(batch), error_id(batch)))
        assert self.data.run(runner.finalize("r1", batch.id, state, **more))

    def result_file(self, batch: BatchRow, file_id: str, text: str) -> WrittenFile:
        """Write a result file of a batch."""
        from frontend.batches.store.rows import NewFile

        async def write() -> WrittenFile:
            objects = self.service.batches.objects
            writer = await objects.open_writer(f"results/{file_id}")
            await writer.write(text.encode())
            written = await writer.commit()
            new = NewFile(
                file_id, batch.workspace_id, "batch_output", "batch_output", "o.jsonl", "application/jsonl",
                f"results/{file_id}",
            )  # fmt: skip
            await self.service.door.store.files.insert(new)
            return WrittenFile(file_id, written.bytes, written.sha256)

        return self.run(write())

    def signal(self, route: str, reason: str | None, live: int = 0, **metrics: Any) -> None:
        self.data.run(self.data.store.scheduling.put_signal(SignalRow(route, reason, live_in_flight=live, **metrics)))

    def put_settings(self, row: SchedulingRow) -> None:
        row = replace(row, updated_by=self.keys["ana"].id)
        self.data.run(self.data.store.scheduling.put_settings(row, None))

    def incident(self, batch: BatchRow, ended_by: str = "") -> None:
        """Raise an incident about a batch, and end it if ``ended_by`` says what did."""
        alerts = self.data.store.alerts
        details = {
            "kind": "batch_stalled", "batch": batch.id, "mode": "gateway", "total": batch.request_total, "done": 12,
            "minutes_without_progress": 61, "window_minutes": 60,
        }  # fmt: skip
        summary = f"Batch {batch.id} has made no progress for 61 minutes"
        name = f"inc_{secrets.token_hex(8)}"
        row = IncidentRow(name, "stalled", batch.id, batch.workspace_id, summary, json.dumps(details))
        assert self.data.run(alerts.open_incident(row))
        if ended_by:
            ended = json.dumps(details | {"ended_by": ended_by})
            assert self.data.run(alerts.resolve("stalled", batch.id, ended))

    def history(self, route: str, edges: list[tuple[float, str | None]], minutes: list[MinuteRow]) -> None:
        """Record what happened: edges by hours before now."""
        now_us = self.data.run(self.data.store.now_us())
        rows = [EdgeRow(route, int(now_us - hours * HOUR_US), "p1", reason, cap=4) for hours, reason in edges]
        self.data.run(self.data.store.explain.add_edges(rows))
        self.data.run(self.data.store.explain.add_minutes(minutes))


def output_id(batch: BatchRow) -> str:
    return batch.id.replace("batch_", "file-")


def error_id(batch: BatchRow) -> str:
    return output_id(batch)[:-1] + ("0" if batch.id[-1] != "0" else "1")


@contextmanager
def pages_world(state_dir: Path, **settings: Any) -> Iterator[PagesWorld]:
    world = PagesWorld(state_dir, **settings)
    world.start()
    try:
        yield world
    finally:
        with contextlib.suppress(Exception):
            world.stop()


def a_day(route: str, now_us: int) -> list[MinuteRow]:
    """Return a day's minutes: live traffic in office hours, lines at night and in pauses."""
    rows = []
    now = now_us // MINUTE_US
    for back in range(24 * 60 - 1, 0, -1):
        minute = now - back
        hour = back / 60
        wave = (minute * 7919) % 97 / 97
        live = 0
        if 3 < hour < 12:
            live = int((1 + 3 * (1 - abs(hour - 7.5) / 4.5)) * (0.4 + wave))
        elif wave > 0.93:
            live = 1
        paused = gate_at(hour) is not None
        running = 0 if paused else min(4, 2 + int(wave * 3.2))
        if hour > 21:
            continue  # nobody had sent a batch yet
        rows.append(
            MinuteRow(
                route, minute, live_max=live, running_max=running, queued_max=900, cap=4, observed_us=MINUTE_US,
                open_us=0 if paused else MINUTE_US, lines_done=running * 3, line_s_sum=running * 12.0,
            )
        )  # fmt: skip
    return rows


EDGES: Final[list[tuple[float, str | None]]] = [
    (21.0, None), (16.4, "server_busy"), (16.1, None), (15.2, "metrics_unavailable"), (14.6, None),
    (12.0, "outside_window"), (3.0, None), (2.2, "live_traffic"), (1.9, None), (1.2, "live_traffic"), (0.9, None),
    (0.2, "live_traffic"),
]  # fmt: skip


def gate_at(hours_ago: float) -> str | None:
    """Return the reason in force so many hours ago."""
    reason = None
    for at, new in EDGES:
        if at >= hours_ago:
            reason = new
    return reason


Scene = dict[str, BatchRow]


def furnish(world: PagesWorld) -> Scene:
    """Fill a world with what a busy afternoon looks like; return the batches by what they are."""
    now_us = world.data.run(world.data.store.now_us())
    world.put_settings(EXAMPLE)
    running = world.batch("ana", 1200, public_model="llama-70b")
    waiting = world.batch("notebook", 5000, public_model="llama-70b", completion_window_hours=72)
    broken = world.batch("pipeline", 300, public_model="llama-70b")
    mixed = world.batch("notebook", 80, public_model="mixed")
    sales = world.batch("crm", 640, SALES, public_model="llama-70b")
    done = world.batch("ana", 60, public_model="minilm", endpoint="/v1/embeddings")
    failed = world.batch("notebook", 40, public_model="gpt-small")
    new = world.batch("ana", 25, public_model="minilm", endpoint="/v1/embeddings")
    world.begin(running, waiting, broken, mixed, sales, done, failed)
    world.progress(running, 410, 7, 3)
    world.progress(waiting, 120, 0, 0)
    world.progress(broken, 12, 2, 0)
    world.progress(mixed, 30, 0, 0)
    world.progress(done, 58, 2, 0, "own")
    world.progress(failed, 3, 9, 0, "cloud")
    output = world.result_file(done, output_id(done), '{"id": "batch_req_1"}\n')
    errors = world.result_file(done, error_id(done), '{"id": "batch_req_2"}\n')
    world.end(done, output=output, error=errors)
    world.end(failed, "expired")
    world.wait_for(running, Demand("gpu-a", 780, None, True))
    world.wait_for(waiting, Demand("gpu-a", 4880, "live_traffic", False))
    world.wait_for(broken, Demand("gpu-b", 286, "metrics_unavailable", False))
    world.wait_for(mixed, Demand("gpu-a", 30, "live_traffic", False), Demand("own", 20, "fair_share", True))
    world.wait_for(sales, Demand("gpu-a", 640, "live_traffic", False))
    world.signal(
        "gpu-a", "live_traffic", 2, metrics_checked_at=now_us - 3_000_000, metrics_ok=True, metrics_waiting=0,
        metrics_running=6, metrics_kv_cache_permille=713,
    )  # fmt: skip
    world.put_settings(SchedulingRow("gpu-b", metrics_url="http://10.0.0.6:8000/metrics", metrics_max_waiting=0))
    world.signal(
        "gpu-b", "metrics_unavailable", metrics_checked_at=now_us, metrics_ok=False, metrics_error="http_status"
    )
    world.signal("own", None, 0)
    world.history("gpu-a", EDGES, a_day("gpu-a", now_us))
    world.incident(broken)
    world.incident(running, "progress")
    world.incident(world.batch("hobby", 3, HOME))
    world.put_settings(SchedulingRow("decommissioned", 3))
    return {
        "running": running, "waiting": waiting, "broken": broken, "mixed": mixed, "sales": sales, "done": done,
        "failed": failed, "new": new,
    }  # fmt: skip
