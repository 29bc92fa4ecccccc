"""Lines per second of one batch runner: claimed, executed against an instant stub in the same process, recorded.

    python bench/batch_runner.py --lines 20000
    python bench/batch_runner.py --lines 50000 --line-bytes 4096 --answer-bytes 1024     # 200 MB of input
    python bench/batch_runner.py --store postgresql --lines 20000

Prints and (with ``--save``) keeps: lines/s from the first claim to the terminal commit, the longest time the event loop
was held up, and the process's peak memory. Nothing is left out: claims, ends and results are committed and fsynced.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import uvloop

from frontend.batches.local import LocalObjects
from frontend.batches.objects import object_path
from frontend.batches.runner.runner import BatchRunner
from frontend.batches.scheduling.effective_caps import FixedCaps
from frontend.batches.scheduling.live_counts import LiveCounts
from frontend.batches.scheduling.metrics_reader import MetricsReader
from frontend.batches.scheduling.route_watch import RouteWatch
from frontend.batches.store.postgres import PostgresDatabase
from frontend.batches.store.protocol import Store, open_store
from frontend.batches.store.rows import BatchRow, NewBatch, NewFile, WrittenFile
from frontend.batches.work_file import IndexBuilder
from frontend.gateway_settings import BatchSettings, GatewaySettings
from frontend.openai.calls import GatewayCall, Plan, Sent, UpstreamAnswer
from frontend.openai.routes import Routes

CHUNK_LINES = 256
LOOK_S = 0.02


class InstantUpstream:
    """Provides ``Executor``: every call is answered in the same turn of the loop."""

    def __init__(self, answer_bytes: int) -> None:
        text = "x" * max(0, answer_bytes - 120)
        body = {"id": "c", "object": "chat.completion", "model": "m", "choices": [{"message": {"content": text}}]}
        self._body = json.dumps(body).encode()
        self.calls = 0
        self.first_s = 0.0

    def plan(self, endpoint: str, model: str) -> Plan:
        return Plan("R")

    async def reach(self, route: str) -> bool:
        return True

    async def execute(self, call: GatewayCall) -> UpstreamAnswer:
        self.calls += 1
        self.first_s = self.first_s or time.perf_counter()
        return UpstreamAnswer(200, self._body, "R", Sent.ANSWERED, "req_1")


async def fill(store: Store, objects: LocalObjects, lines: int, line_bytes: int) -> BatchRow:
    """Create one batch as validation leaves it."""
    await store.keys.create_workspace("ws_bench", "bench")
    await store.keys.create_key("key_bench", "ws_bench", "member", "k", "sk", "a" * 64)
    file_id = "file-" + "1" * 32
    index = IndexBuilder()
    writer = await objects.open_writer(object_path(file_id))
    text = "y" * max(0, line_bytes - 150)
    for start in range(0, lines, CHUNK_LINES):
        chunk = []
        for number in range(start, min(lines, start + CHUNK_LINES)):
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            value = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            line = json.dumps(value).encode()
            index.add(line, "m")
            chunk.append(line)
        await writer.write(b"\n".join(chunk) + b"\n")
    await writer.write(index.finish())
    written = await writer.commit()
    await store.files.insert(NewFile(file_id, "ws_bench", "batch_input", None, "work", "x", object_path(file_id)))
    input_id = "file-" + "2" * 32
    await store.files.insert(NewFile(input_id, "ws_bench", "batch_input", "batch", "in", "x", "none"))
    await store.files.commit(WrittenFile(input_id, 1, "0" * 64))
    new = NewBatch(
        "batch_" + "3" * 32, "ws_bench", "key_bench", "/v1/chat/completions", "m", input_id,
        WrittenFile(file_id, written.bytes, written.sha256), 24, 0, lines,
    )  # fmt: skip
    return (await store.batches.create(new, active_limit=10))[0]


async def look(store: Store, batch: BatchRow) -> BatchRow:
    found = await store.batches.get(None, batch.id)
    assert found is not None
    return found


async def measure(arguments: argparse.Namespace, directory: Path, url: str) -> dict[str, Any]:
    """Run one batch to its end and return the figures."""
    # Beyond what most routes should be given: what the runner can do, not what its gates let through.
    batches = BatchSettings(workers=arguments.workers, default_max_concurrency=min(arguments.workers, 256))
    settings = GatewaySettings(enabled=True, store=url, batches=batches)
    if url:
        database = PostgresDatabase(url)
        await database.open()
        await database.migrate()
        await database.close()
    store = open_store(settings, directory)
    objects = LocalObjects(directory / "files")
    await store.start()
    await objects.start()
    batch = await fill(store, objects, arguments.lines, arguments.line_bytes)
    before_mib = peak_mib()
    upstream = InstantUpstream(arguments.answer_bytes)
    opened = asyncio.Event()
    opened.set()
    live = LiveCounts(directory, Routes(settings, {}), store, opened, reads=True)
    live.start()
    load = MetricsReader(())
    cap = settings.batches.default_max_concurrency
    watch = RouteWatch("bench", store, cap, live, load, FixedCaps(), lambda route: "vllm")
    runner = BatchRunner(
        settings, store, objects, upstream, gates=[watch.gates], limits=watch.limits, observer=watch, runner_id="bench"
    )
    # As the process does.
    gc.collect()
    gc.freeze()
    cpu_s = time.process_time()
    await runner.start()
    watch.start(runner)
    # The batch ends in the store, which announces nothing to this process.
    while not (found := await look(store, batch)).finished:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    took_s = time.perf_counter() - upstream.first_s
    assert (found.request_completed, upstream.calls) == (arguments.lines, arguments.lines), found
    cpu_s = time.process_time() - cpu_s
    await runner.close()
    await watch.close()
    await live.close()
    await objects.close()
    await store.close()
    return {
        "store": "postgresql" if url else "sqlite",
        "lines": arguments.lines,
        "line_bytes": arguments.line_bytes,
        "answer_bytes": arguments.answer_bytes,
        "workers": arguments.workers,
        "lines_per_s": round(arguments.lines / took_s),
        "cpu_us_per_line": round(cpu_s / arguments.lines * 1e6, 1),
        "longest_block_ms": round(runner.figures.longest_block_s * 1e3, 1),
        "longest_busy_ms": round(runner.figures.longest_busy_s * 1e3, 1),
        "peak_mib": round(peak_mib()),
        "peak_before_mib": round(before_mib),
        "cpus": len(os.sched_getaffinity(0)),
    }


def peak_mib() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--line-bytes", type=int, default=400)
    parser.add_argument("--answer-bytes", type=int, default=400)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", metavar="FILE", help="append the figures to a JSON list")
    arguments = parser.parse_args()
    found = []
    with ExitStack() as stack:
        server = None
        if arguments.store == "postgresql":
            from postgres_server import running_server

            server = stack.enter_context(running_server())
            # Off for tests.
            server.sql("ALTER SYSTEM SET fsync = on")
            server.sql("SELECT pg_reload_conf()")
            assert server.sql("SHOW fsync") == "on"
        for number in range(arguments.repeats):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = ""
            if server is not None:
                name = f"bench{number}"
                server.sql(f"CREATE DATABASE {name}")
                url = server.url(name)
            found.append(uvloop.run(measure(arguments, directory, url)))
            print(json.dumps(found[-1]))
    if arguments.save:
        path = Path(arguments.save)
        old = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*old, *found], indent=1) + "\n")


if __name__ == "__main__":
    main()
