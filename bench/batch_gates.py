"""What gates buy: live latency and batch throughput, with no batch, with batches that know no gate, and with gates.

    .venv/bin/python bench/batch_gates.py --upstream model --save bench/results
    .venv/bin/python bench/batch_gates.py --upstream llama --save bench/results
    .venv/bin/python bench/batch_gates.py --upstream model --sparse --save bench/results

A real node between a load generator and an upstream: the server of ``bench/latency_model.py``, or llama.cpp with
SmolLM2 135M on the CPU, as the tests start it. Bursts of live callers, each of which calls again as soon as it has its
answer, take turns with idle time; ``--sparse``: they pause for a second on average before they call again. The ways are
measured in turn, round after round, so that a noisy machine disturbs all of them. All batch ways may run as many lines
at once; ``gated`` has ``yield_live_threshold: 1`` besides, and ``held`` (sparse callers only) that and
``reopen_after_s``. ``ungated`` is measured in the first round alone: it shows what the others avert.

As many rounds as fit into ``--minutes``, ``--rounds`` at most. Where others that do not give way used more
than a tenth of the machine during some way of a round, the round is marked, and left out of the figures if there is one
that is not. With ``--urgent`` few others do not give way.

Idle capacity: the lines per second that batches alone reach at the same number of lines at once, times the seconds
without any live call. In each round it is measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import aiohttp

import onnx_models
from bench.compare_peers import machine, take_precedence
from bench.gates_report import Pass, Round, draw, figures, table
from bench.other_work import OtherWork
from llama_server import LlamaServer
from node_models import rows_manifest
from real_node import Node, until

LIVE_ONLY, UNGATED, GATED, HELD = "live only", "ungated", "gated", "held"
SETTINGS: dict[str, dict[str, int]] = {
    UNGATED: {},
    GATED: {"yield_live_threshold": 1},
    HELD: {"yield_live_threshold": 1, "reopen_after_s": 10},
}
START_S = 20.0
"""Of all that comes before the first round and after the last one."""
PATH = "/v1/chat/completions"
SAMPLE_S = 0.5
LINES = 20_000
"""More than any pass can run; what is left is cancelled."""

NODE_FILE = """
gateway:
  enabled: true
  development: true
  models:
    - {{name: ungated, routes: [{{id: ungated, kind: openai_compatible, endpoint: "{url}", addresses: [127.0.0.1]}}]}}
    - {{name: gated, routes: [{{id: gated, kind: openai_compatible, endpoint: "{url}", addresses: [127.0.0.1]}}]}}
    - {{name: held, routes: [{{id: held, kind: openai_compatible, endpoint: "{url}", addresses: [127.0.0.1]}}]}}
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an upstream.

    Attributes:
        callers: live callers of a burst.
        cap: batch lines at once, gated or not.
        live_tokens, line_tokens: ``max_tokens`` of a call and of a line.
        pause_s: how long a caller waits between its calls, on average (exponential).
    """

    callers: int
    cap: int
    live_tokens: int
    line_tokens: int
    burst_s: float
    idle_s: float
    cycles: int
    alone_s: float
    pause_s: float = 0.0


class Gateway:
    """The node as its clients see it."""

    def __init__(self, port: int, key: str, load: Load) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._load = load
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            self._base, headers=self._headers, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        )

    async def close(self) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Return the decoded answer of a call that must succeed."""
        assert self._session is not None
        async with self._session.request(method, path, **options) as answer:
            found = await answer.json()
            assert answer.status == 200, (answer.status, found)
            return found

    async def settle(self) -> None:
        """Write the scheduling settings of all routes and wait until every process has read them."""
        for name, settings in SETTINGS.items():
            document = {"max_concurrency": self._load.cap, **settings}
            await self.ask("PUT", f"/api/v1/platform/deployments/{name}/batch-scheduling", json=document)
        await asyncio.sleep(6)

    def body(self, model: str, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Tell me about the sea."}]
        # The same number of tokens each time: a language model would end earlier now and then.
        return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}

    async def live(self, model: str, number: int, calls: list[tuple[float, float]], until_s: float) -> None:
        """Call, note start and end, and call again; the pauses of a caller are the same each time."""
        pauses = random.Random(number)
        while time.monotonic() < until_s:
            if self._load.pause_s:
                await asyncio.sleep(pauses.expovariate(1 / self._load.pause_s))
                if time.monotonic() >= until_s:
                    return
            began_s = time.monotonic()
            await self.ask("POST", PATH, json=self.body(model, self._load.live_tokens))
            calls.append((began_s, time.monotonic()))

    @asynccontextmanager
    async def batch(self, model: str) -> AsyncIterator[str]:
        """A batch that is running; cancelled and ended afterwards."""
        body = self.body(model, self._load.line_tokens)
        lines = [{"custom_id": str(i), "method": "POST", "url": PATH, "body": body} for i in range(LINES)]
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="in.jsonl")
        file = await self.ask("POST", "/v1/files", data=form)
        asked = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
        batch = (await self.ask("POST", "/v1/batches", json=asked))["id"]
        # What happens in other processes is announced to nobody here.
        while await self.done(batch) == 0:  # noqa: ASYNC110
            await asyncio.sleep(SAMPLE_S)
        try:
            yield batch
        finally:
            await self.ask("POST", f"/v1/batches/{batch}/cancel")
            while (await self.ask("GET", f"/v1/batches/{batch}"))["status"] != "cancelled":  # noqa: ASYNC110
                await asyncio.sleep(SAMPLE_S)

    async def done(self, batch: str) -> int:
        """Return how many lines have succeeded."""
        counts = (await self.ask("GET", f"/v1/batches/{batch}"))["request_counts"]
        assert counts["failed"] == 0, counts
        return int(counts["completed"])

    async def sample(self, batch: str | None, began_s: float, samples: list[tuple[float, int]]) -> None:
        """Note how many lines are done, until cancelled."""
        while batch is not None:
            samples.append((time.monotonic() - began_s, await self.done(batch)))
            await asyncio.sleep(SAMPLE_S)

    async def run(self, model: str, batch: str | None, seconds: Sequence[tuple[float, int]]) -> Pass:
        """Return what happens during stretches of time, each with so many live callers of a model."""
        calls: list[tuple[float, float]] = []
        samples: list[tuple[float, int]] = []
        before = 0 if batch is None else await self.done(batch)
        others = OtherWork()
        began_s = due_s = time.monotonic()
        sampling = asyncio.create_task(self.sample(batch, began_s, samples))
        for length_s, callers in seconds:
            due_s += length_s
            if callers:
                await asyncio.gather(*(self.live(model, number, calls, due_s) for number in range(callers)))
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        took_s = time.monotonic() - began_s
        after = 0 if batch is None else await self.done(batch)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        return Pass(
            took_s,
            [(start - began_s, end - began_s) for start, end in calls],
            after - before,
            [(at, done - before) for at, done in samples],
            others.share(),
        )

    async def way(self, name: str) -> Pass:
        """Return one pass: idle time and bursts in turn."""
        stretches = [(self._load.idle_s, 0), (self._load.burst_s, self._load.callers)] * self._load.cycles
        if name == LIVE_ONLY:
            return await self.run(GATED, None, stretches)
        async with self.batch(name) as batch:
            # Live calls that the route of an ungated batch sees would close nothing there either.
            return await self.run(name, batch, stretches)

    async def alone(self) -> Pass:
        """Return what batches reach when nobody else calls."""
        async with self.batch(UNGATED) as batch:
            return await self.run(UNGATED, batch, [(self._load.alone_s, 0)])

    async def round(self, number: int, ways: Sequence[str]) -> Round:
        """Return one pass of every way, and of batches alone."""
        found = {"alone": await self.alone()}
        # Another order in each round: a machine that warms up, or others on it, must not favour one way.
        for name in (*ways[number % len(ways) :], *ways[: number % len(ways)]):
            found[name] = await self.way(name)
            print(f"round {number + 1}, {name}: {found[name].summary()}", file=sys.stderr)
        return found


async def measure(port: int, key: str, load: Load, rounds: int, until_s: float) -> list[Round]:
    """Return as many rounds as end before ``until_s`` (monotonic), one at least."""
    gateway = Gateway(port, key, load)
    await gateway.start()
    try:
        await gateway.settle()
        ways = (LIVE_ONLY, GATED, HELD) if load.pause_s else (LIVE_ONLY, GATED)
        for model in ways[1:]:
            await gateway.run(model, None, [(3.0, load.callers)])  # warm
        found: list[Round] = []
        longest_s = 0.0
        while len(found) < rounds and (not found or time.monotonic() + longest_s <= until_s):
            began_s = time.monotonic()
            found.append(await gateway.round(len(found), ways if found else (*ways, UNGATED)))
            # The first one has a way more than those to come.
            longest_s = (time.monotonic() - began_s) * (1.0 if len(found) > 1 else len(ways) / (len(ways) + 1))
        return found
    finally:
        await gateway.close()


@contextmanager
def latency_model() -> Iterator[str]:
    """The stub as a process of its own; yields its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(ROOT / "bench" / "latency_model.py"), str(port)])
    try:
        until("the latency model listens", lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


@contextmanager
def llama() -> Iterator[str]:
    with LlamaServer() as server:
        yield server.url


UPSTREAMS = {
    "model": (latency_model, Load(4, 8, 20, 20, 50.0, 15.0, 1, 10.0)),
    "llama": (llama, Load(2, 2, 16, 16, 50.0, 12.0, 1, 12.0)),
}
SPARSE_PAUSE_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", choices=tuple(UPSTREAMS), default="model")
    parser.add_argument("--sparse", action="store_true", help="callers pause for a second; with a gate that waits, too")
    parser.add_argument("--rounds", type=int, default=10, help="at most")
    parser.add_argument("--minutes", type=float, default=9.0, help="that all of it may take")
    for name in ("callers", "cap", "cycles"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("burst-s", "idle-s", "alone-s", "pause-s"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--urgent", action="store_true", help="run ahead of the machine's other work; needs root")
    parser.add_argument("--name", help="of the files; the upstream's by default")
    parser.add_argument("--save", type=Path, metavar="DIRECTORY", help="write batch_gates_NAME.json and .png there")
    arguments = parser.parse_args()
    if arguments.sparse and arguments.pause_s is None:
        arguments.pause_s = SPARSE_PAUSE_S
    if arguments.urgent:
        take_precedence()
    start, load = UPSTREAMS[arguments.upstream]
    given = {name: getattr(arguments, name) for name in asdict(load) if getattr(arguments, name, None) is not None}
    load = Load(**asdict(load) | given)
    until_s = time.monotonic() + arguments.minutes * 60 - START_S
    with tempfile.TemporaryDirectory() as name, start() as url:
        directory = Path(name)
        # A node serves models of its own besides; this one is never called.
        path = onnx_models.affine(directory / "models" / "unused", columns=4)
        (path.parent / "manifest.yaml").write_text(rows_manifest())
        node_file = directory / "node.yaml"
        node_file.write_text(NODE_FILE.format(url=url))
        with Node(directory / "models", directory / "run", frontends=1, node_file=node_file) as node:
            key = node.wait_line("ringserve development key: ").rpartition(" ")[2]
            rounds = asyncio.run(measure(node.ports["http_port"], key, load, arguments.rounds, until_s))
    found = figures(rounds)
    context = {"upstream": arguments.upstream, "load": asdict(load), "rounds": len(rounds)} | machine()
    print(json.dumps(context))
    print(table(found))
    if arguments.save:
        target = arguments.save / f"batch_gates_{arguments.name or ('sparse' if load.pause_s else arguments.upstream)}"
        # The first one: it has all ways.
        first = {name: asdict(one) for name, one in rounds[0].items()}
        target.with_suffix(".json").write_text(json.dumps({**context, "figures": found, "first_round": first}) + "\n")
        draw(
            rounds[0],
            target.with_suffix(".png"),
            f"{arguments.upstream}: {load.callers} callers, {load.cap} lines at once",
        )


if __name__ == "__main__":
    main()
