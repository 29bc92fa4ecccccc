"""A model server without a model: its latency follows how many requests it runs, as with continuous batching.

    .venv/bin/python bench/latency_model.py PORT

All running requests advance by one token per step. A step lasts ``LEAST_MS``, however few they are, or ``EACH_MS`` for
each of them: reading the weights takes the same time for one as for eight, and from then on computing is what lasts.
At most ``SLOTS`` run, the others wait in order of arrival. ``max_tokens`` of a request are its steps. ``/metrics`` is
like vLLM's.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from dataclasses import dataclass

from aiohttp import web

SLOTS = 16
LEAST_MS = 20.0
EACH_MS = 2.5


@dataclass(slots=True, eq=False)
class Request:
    tokens: int
    done: asyncio.Future[None]


class LatencyModel:
    """The steps of the server, on one event loop."""

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._arrived = asyncio.Event()

    async def run(self, tokens: int) -> None:
        """Return when the request has got its tokens."""
        request = Request(tokens, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        self._arrived.set()
        await request.done

    async def step_for_ever(self) -> None:
        due_s = time.monotonic()
        while True:
            while self.waiting and len(self.running) < SLOTS:
                self.running.append(self.waiting.popleft())
            if not self.running:
                self._arrived.clear()
                await self._arrived.wait()
                due_s = time.monotonic()
                continue
            # From step to step on a schedule: a late turn of this loop must not add up to a slower server.
            due_s = max(due_s + step_s(len(self.running)), time.monotonic() - step_s(SLOTS))
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            for request in self.running:
                request.tokens -= 1
                # Whoever went away meanwhile has cancelled it.
                if request.tokens <= 0 and not request.done.done():
                    request.done.set_result(None)
            self.running = [one for one in self.running if one.tokens > 0 and not one.done.done()]


def step_s(running: int) -> float:
    """Return how long a step of so many requests lasts."""
    return max(LEAST_MS, EACH_MS * running) / 1e3


def application(model: LatencyModel) -> web.Application:
    """Return the HTTP side: chat completions and metrics."""

    async def complete(request: web.Request) -> web.Response:
        asked = await request.json()
        await model.run(int(asked["max_tokens"]))
        message = {"role": "assistant", "content": "word " * asked["max_tokens"]}
        usage = {"prompt_tokens": 8, "completion_tokens": asked["max_tokens"], "total_tokens": 8 + asked["max_tokens"]}
        return web.json_response({
            "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": asked["model"], "usage": usage,
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        })  # fmt: skip

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            text=f'vllm:num_requests_waiting{{engine="0"}} {len(model.waiting)}\n'
            f'vllm:num_requests_running{{engine="0"}} {len(model.running)}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {len(model.running) / SLOTS}\n'
        )

    async def stepping(app: web.Application) -> None:
        app["steps"] = asyncio.create_task(model.step_for_ever())

    found = web.Application()
    found.add_routes([web.post("/v1/chat/completions", complete), web.get("/metrics", metrics)])
    found.on_startup.append(stepping)
    return found


async def serve(port: int) -> None:
    """Serve until the process ends."""
    runner = web.AppRunner(application(LatencyModel()), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
