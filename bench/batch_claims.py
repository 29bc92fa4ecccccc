"""Many batches, several runner processes, one PostgreSQL: how long claims take, what idle batches write, idle routes.

    python bench/batch_claims.py                                # 100 batches x 500 lines, 4 routes, 3 processes
    python bench/batch_claims.py --models-per-batch 1           # every batch on one route, not on all four
    python bench/batch_claims.py --save bench/results/batch_claims.json

The runners are whole processes with their gates, calls go over HTTP to a stub in this process that answers after
``--latency-ms``. First every route's time window is closed: what is written then is written for batches that wait
(counted by PostgreSQL's transaction ids, which only writing transactions get). Then the windows open and all lines
run. A claim is timed from its call to its commit, waiting for a connection and for the route's lock included.
A route's idle time is the longest during which the stub had no call of it while lines were still to come.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import msgspec
import uvloop

from frontend.batches.local import LocalObjects
from frontend.batches.objects import object_path
from frontend.batches.settings import BatchesSettings
from frontend.batches.store.postgres import PostgresDatabase, postgres_store
from frontend.batches.store.rows import NewBatch, NewFile, SchedulingRow, WrittenFile
from frontend.batches.store.sql_store import SqlStore
from frontend.batches.store.transaction import query
from frontend.batches.work_file import IndexBuilder
from frontend.gateway_settings import BatchSettings, GatewayModel, GatewaySettings, RouteSettings

ROUTES = 4
WORKSPACES = 10
INPUT_ID = "file-input-{}"
END_S = 900.0
LOOK_S = 0.2
DRAIN_S = 60.0


# The child: a runner process whose claims are timed


def run_child(settings_file: Path, figures_file: Path) -> int:
    """Run batches until SIGTERM, then write down how long each claim took."""
    from frontend.batches.process import run
    from frontend.batches.store.runner_ops import RunnerOps

    claims_ms: list[float] = []
    answers: Counter[str] = Counter()
    plain = RunnerOps._claim

    async def timed(self: RunnerOps, runner_id: str, group: Any) -> Any:
        start = time.perf_counter()
        try:
            claimed = await plain(self, runner_id, group)
            answers.update(one.value for batch in claimed for one in batch)
            return claimed
        finally:
            claims_ms.append((time.perf_counter() - start) * 1e3)

    RunnerOps._claim = timed  # type: ignore[method-assign]
    status = run(msgspec.json.decode(settings_file.read_bytes(), type=BatchesSettings), None)
    used = resource.getrusage(resource.RUSAGE_SELF)
    figures_file.write_text(
        json.dumps(
            {
                "claims_ms": [round(one, 3) for one in claims_ms],
                "answers": answers,
                "cpu_s": used.ru_utime + used.ru_stime,
            }
        )
    )
    return status


# The upstream


@dataclass
class RouteSeen:
    """What the stub saw of one route; times are of the loop's clock."""

    calls: int = 0
    now: int = 0
    most: int = 0
    idle_since: float | None = None
    longest_idle_s: float = 0.0

    def begin(self, at_s: float) -> None:
        if self.now == 0 and self.idle_since is not None:
            self.longest_idle_s = max(self.longest_idle_s, at_s - self.idle_since)
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)

    def end(self, at_s: float) -> None:
        self.now -= 1
        if self.now == 0:
            self.idle_since = at_s


@dataclass
class Stub:
    """Answers every completion after a while; the path's first part names the route."""

    latency_s: float
    routes: dict[str, RouteSeen] = field(default_factory=dict)

    def __call__(self) -> asyncio.Protocol:
        return StubConnection(self)


class StubConnection(asyncio.Protocol):
    """One HTTP/1.1 connection; calls on it come one after another."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lower = head.lower()
        length = int(lower.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        seen = self._stub.routes.setdefault(head.split(b"/", 2)[1].decode(), RouteSeen())
        seen.begin(self._loop.time())
        self._loop.call_later(self._stub.latency_s, self._answer, seen)

    def _answer(self, seen: RouteSeen) -> None:
        seen.end(self._loop.time())
        if not self._transport.is_closing():
            self._transport.write(ANSWER)


BODY = json.dumps(
    {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 200}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
).encode()  # fmt: skip
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


# The installation


def settings_of(arguments: argparse.Namespace, directory: Path, url: str, port: int, number: int) -> BatchesSettings:
    models = tuple(
        GatewayModel(
            name=f"m{i}",
            routes=(
                RouteSettings(
                    id=f"R{i}", kind="vllm", endpoint=f"http://127.0.0.1:{port}/r{i}/v1", addresses=("127.0.0.1",)
                ),
            ),
        )
        for i in range(ROUTES)
    )
    return BatchesSettings(
        name=f"batches{number}",
        run_dir=str(directory / "run"),
        gateway=GatewaySettings(
            enabled=True,
            development=True,
            state_dir=str(directory),
            store=url,
            models=models,
            batches=BatchSettings(workers=arguments.workers),
        ),
    )


async def fill(store: SqlStore, objects: LocalObjects, arguments: argparse.Namespace) -> list[str]:
    """Create the batches as validation leaves them; return their ids."""
    for workspace in range(WORKSPACES):
        await store.keys.create_workspace(f"ws_{workspace}", f"w{workspace}")
        await store.keys.create_key(f"key_{workspace}", f"ws_{workspace}", "member", "k", "sk", f"{workspace:064}")
        input_id = INPUT_ID.format(workspace)
        await store.files.insert(NewFile(input_id, f"ws_{workspace}", "batch_input", "batch", "in", "x", "none"))
        await store.files.commit(WrittenFile(input_id, 1, "0" * 64))
    ids = []
    for number in range(arguments.batches):
        workspace = number % WORKSPACES
        file_id = f"file-{number:032x}"
        index = IndexBuilder()
        lines = []
        for line in range(arguments.lines):
            model = f"m{(number // WORKSPACES + line % arguments.models_per_batch) % ROUTES}"
            body = {"model": model, "messages": [{"role": "user", "content": f"{number}/{line} " + "y" * 200}]}
            value = {"custom_id": f"r{line}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.append(json.dumps(value).encode())
            index.add(lines[-1], model)
        writer = await objects.open_writer(object_path(file_id))
        await writer.write(b"\n".join(lines) + b"\n" + index.finish())
        written = await writer.commit()
        await store.files.insert(
            NewFile(file_id, f"ws_{workspace}", "batch_input", None, "work", "x", object_path(file_id))
        )
        new = NewBatch(
            f"batch_{number:032x}", f"ws_{workspace}", f"key_{workspace}", "/v1/chat/completions", "mixed",
            INPUT_ID.format(workspace), WrittenFile(file_id, written.bytes, written.sha256), 24, 0, arguments.lines,
        )  # fmt: skip
        ids.append((await store.batches.create(new, active_limit=10_000))[0].id)
    return ids


def setting(number: int, cap: int, *, closed: bool) -> SchedulingRow:
    """Return a route's settings; closed = only in a minute of another day."""
    if not closed:
        return SchedulingRow(f"R{number}", cap, updated_by="bench")
    other = (datetime.datetime.now(datetime.UTC).weekday() + 3) % 7
    return SchedulingRow(
        f"R{number}", cap, window_timezone="UTC", window_days=1 << other, window_start_minute=0, window_end_minute=1,
        updated_by="bench",
    )  # fmt: skip


async def writes(database: PostgresDatabase) -> int:
    """Return the next transaction id: it moves by one per transaction that wrote."""
    rows = await query(database, "SELECT CAST(CAST(pg_snapshot_xmax(pg_current_snapshot()) AS TEXT) AS BIGINT)")
    return int(rows[0][0])


@contextmanager
def runners(
    arguments: argparse.Namespace, directory: Path, url: str, port: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes; whatever happens, none is left."""
    started = []
    try:
        for number in range(arguments.processes):
            settings_file = directory / f"settings{number}.json"
            settings_file.write_bytes(msgspec.json.encode(settings_of(arguments, directory, url, port, number)))
            command = [
                sys.executable,
                __file__,
                "--child",
                str(settings_file),
                str(directory / f"figures{number}.json"),
            ]
            with (directory / f"log{number}").open("wb") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ))
        yield started
    except BaseException:
        for number, process in enumerate(started):
            if process.poll() is not None:
                print((directory / f"log{number}").read_text()[-2000:], file=sys.stderr)
        raise
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


async def measure(arguments: argparse.Namespace, directory: Path, url: str) -> dict[str, Any]:
    database = PostgresDatabase(url)
    await database.open()
    await database.migrate()
    store = postgres_store(url)
    objects = LocalObjects(directory / "files")
    await store.start()
    await objects.start()
    stub = Stub(arguments.latency_ms / 1e3)
    server = await asyncio.get_running_loop().create_server(stub, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ids = await fill(store, objects, arguments)
    for number in range(ROUTES):
        await store.scheduling.put_settings(setting(number, arguments.cap, closed=True), None)
    try:
        with runners(arguments, directory, url, port) as processes:
            found = await phases(arguments, store, database, stub, ids, processes)
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                await asyncio.to_thread(process.wait, DRAIN_S)
    finally:
        server.close()
        await objects.close()
        await store.close()
        await database.close()
    files = [directory / f"figures{number}.json" for number in range(arguments.processes)]
    told = [json.loads(file.read_text()) for file in files]
    claims = sorted(one for figures in told for one in figures["claims_ms"])
    answers = sum((Counter(figures["answers"]) for figures in told), Counter[str]())
    routes = stub.routes.values()
    assert sum(route.calls for route in routes) == arguments.batches * arguments.lines, "a line was lost or sent twice"
    assert max(route.most for route in routes) <= arguments.cap, "a cap was exceeded"
    return found | {
        "runner_cpu_ms_per_line": round(
            sum(figures["cpu_s"] for figures in told) * 1e3 / (arguments.batches * arguments.lines), 2
        ),
        "claims": len(claims),
        "lines_asked_per_line": round(answers.total() / answers["claimed"], 2),
        "claim_p50_ms": round(claims[len(claims) // 2], 2),
        "claim_p99_ms": round(claims[len(claims) * 99 // 100], 2),
        "claim_p999_ms": round(claims[len(claims) * 999 // 1000], 2),
        "claim_max_ms": round(claims[-1], 2),
        "longest_idle_route_s": round(max(route.longest_idle_s for route in routes), 3),
        "most_in_flight_on_a_route": max(route.most for route in routes),
    }


async def until(processes: Sequence[subprocess.Popen[bytes]], what: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again until something holds; a runner that ended is a failure, whose log says why."""
    while not await what():
        for number, process in enumerate(processes):
            assert process.poll() is None, f"runner {number} ended: {process.returncode}"
        await asyncio.sleep(LOOK_S)


async def phases(
    arguments: argparse.Namespace,
    store: SqlStore,
    database: PostgresDatabase,
    stub: Stub,
    ids: list[str],
    processes: Sequence[subprocess.Popen[bytes]],
) -> dict[str, Any]:
    """Look at closed routes, then open them and see all lines through."""
    total = arguments.batches * arguments.lines

    async def all_wait() -> bool:
        return len({row.batch_id for row in await store.scheduling.fresh_waits()}) == len(ids)

    async def calls(number: int) -> bool:
        return sum(route.calls for route in stub.routes.values()) >= number

    async def all_ended() -> bool:
        rows = [await store.batches.get(None, batch_id) for batch_id in ids]
        return all(row is not None and row.state == "completed" and row.settled_at is not None for row in rows)

    async with asyncio.timeout(END_S):
        await until(processes, all_wait)
        await asyncio.sleep(arguments.settle_s)
        before, start = await writes(database), time.perf_counter()
        await asyncio.sleep(arguments.idle_s)
        idle = (await writes(database) - before) / (time.perf_counter() - start) / len(ids)
        assert not stub.routes, "a line started through a closed window"
        for number in range(ROUTES):
            await store.scheduling.put_settings(setting(number, arguments.cap, closed=False), None)
        await until(processes, lambda: calls(1))
        before, start, first = (
            await writes(database),
            time.perf_counter(),
            sum(one.calls for one in stub.routes.values()),
        )
        await until(processes, lambda: calls(total))
        took_s = time.perf_counter() - start
        wrote = await writes(database) - before
        await until(processes, all_ended)
    return {
        "batches": arguments.batches,
        "lines_each": arguments.lines,
        "routes": ROUTES,
        "models_per_batch": arguments.models_per_batch,
        "processes": arguments.processes,
        "cap": arguments.cap,
        "latency_ms": arguments.latency_ms,
        "write_transactions_per_idle_batch_and_s": round(idle, 3),
        "lines_per_s": round((total - first) / took_s),
        "possible_lines_per_s": round(ROUTES * arguments.cap / arguments.latency_ms * 1e3),
        "write_transactions_per_line": round(wrote / (total - first), 3),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return run_child(Path(sys.argv[2]), Path(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--models-per-batch", type=int, default=ROUTES, choices=range(1, ROUTES + 1))
    parser.add_argument("--cap", type=int, default=16, help="batch lines at once per route")
    parser.add_argument("--workers", type=int, default=64, help="per process")
    parser.add_argument("--latency-ms", type=float, default=200.0)
    parser.add_argument("--settle-s", type=float, default=5.0)
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--save", metavar="FILE", help="append the figures to a JSON list")
    arguments = parser.parse_args()
    from postgres_server import running_server

    with ExitStack() as stack:
        server = stack.enter_context(running_server())
        # Off for tests.
        server.sql("ALTER SYSTEM SET fsync = on")
        server.sql("SELECT pg_reload_conf()")
        assert server.sql("SHOW fsync") == "on"
        server.sql("CREATE DATABASE bench")
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = uvloop.run(measure(arguments, directory, server.url("bench")))
    print(json.dumps(found, indent=1))
    if arguments.save:
        path = Path(arguments.save)
        old = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*old, found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
