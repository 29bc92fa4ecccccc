"""Runs calls: which route, one attempt on it, the answer in the form a client gets.

Theory of operation
    One call makes at most one attempt per route. A live call goes on to the model's next route only when nothing can
    have run and nothing has gone to the client: the connection could not be made (NOT_SENT), or the upstream declined
    with 429 or 503 (DECLINED). A request that was sent and then lost is not sent anywhere again: it may have run, and
    a request that kills its server must not go round all of them. The same route is never tried twice: retrying is the
    client's business (BG-20), which is told Retry-After. A call with a pinned route has that route and no other.
    If no route gives an answer, the client gets the most useful failure: a busy upstream's before an absent one's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from engines.errors import NotFound, NotReady, ServingError, Unavailable
from frontend.openai import bodies, local, upstream_errors
from frontend.openai.answers import (
    DECLINING,
    AnswerStream,
    Job,
    complete_answer,
    failed_answer,
    new_request_id,
    refusal,
    unknown_model,
)
from frontend.openai.breaker_state import Event
from frontend.openai.calls import EMBEDDINGS, MODEL_ENDPOINTS, GatewayCall, Plan, Sent, UpstreamAnswer, infer_model
from frontend.openai.errors import ApiError
from frontend.openai.routes import Lease, Route, Routes, ServedModel
from frontend.openai.series import GatewayTraffic, Outcome, outcome_of
from frontend.openai.upstream import UpstreamClient, UpstreamFailure
from frontend.serving import Serving

MAX_ROUTES_TRIED: Final = 4
"""Attempts of one live call, each on another route."""
LOADING_WAIT_S: Final = 1.0
"""When to look again for a bundle that is being loaded."""
BATCH_HEADER: Final = "X-Ringserve-Traffic"
PRIORITY_KINDS: Final = ("vllm", "openai_compatible")
"""Upstreams that may be sent a batch line's ``priority``: a setting of the route, so its operator knows the server."""
_BROKEN: Final = (502, 504)


class Gateway:
    """The ``Executor`` of a process: its routes, its connections, its own worker."""

    def __init__(
        self,
        routes: Routes,
        client: UpstreamClient,
        serving: Serving | None,
        *,
        allow_client_priority: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        wall_clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.routes = routes
        self.traffic = GatewayTraffic()
        self._client = client
        self._serving = serving
        self._allow_client_priority = allow_client_priority
        self._clock_ns = clock_ns
        self._wall_clock_s = wall_clock_s

    async def start(self) -> None:
        """Be ready to call upstreams."""
        for route in self.routes.all():
            if route.endpoint is not None:
                self._client.pin(route.endpoint)
        await self._client.start()

    async def close(self) -> None:
        """Drop every call; idempotent."""
        await self._client.close()

    def model_names(self) -> list[str]:
        """Return every public model, configured ones first."""
        names = self.routes.names()
        own = local.embedding_models(self._serving) if self._serving is not None else []
        return names + [name for name in own if self.routes.model(name) is None]

    def plan(self, endpoint: str, model: str) -> Plan:
        """See ``Executor.plan``."""
        try:
            served, usable = self._usable(endpoint, model)
        except (NotReady, Unavailable):
            return Plan("", LOADING_WAIT_S)
        except ServingError:
            return Plan("")
        ordered = self.routes.order(served, usable)
        return Plan(ordered[0].id) if ordered else Plan("", self.routes.wait_s(usable))

    async def reach(self, route: str) -> bool:
        """See ``Executor.reach``."""
        found = self.routes.route(route)
        if found is None or found.endpoint is None:
            return True
        return await self._client.reach(found.endpoint, found.settings.connect_timeout_seconds)

    async def execute(self, call: GatewayCall) -> UpstreamAnswer:
        """See ``Executor.execute``."""
        request_id = call.request_id or new_request_id()
        try:
            job = self._job(call, request_id, streams=False)
            answer = await self._run(job)
        except ServingError as error:
            return refusal(error, request_id)
        assert isinstance(answer, UpstreamAnswer)
        return answer

    async def stream(self, call: GatewayCall) -> AnswerStream | UpstreamAnswer:
        """Return a live call's answer once its head has arrived: a stream, or what came instead of one."""
        request_id = call.request_id or new_request_id()
        try:
            return await self._run(self._job(call, request_id, streams=True))
        except ServingError as error:
            return refusal(error, request_id)

    # Which routes

    def _usable(self, endpoint: str, model: str) -> tuple[ServedModel, list[Route]]:
        """Return a model and those of its routes that can take a call of this endpoint.

        Raises:
            ApiError: there is no such model, or none of its routes offers the endpoint.
            NotReady, Unavailable: it cannot be told now.
        """
        served = self.routes.model(model)
        if infer_model(endpoint) is not None:
            # Only our own worker speaks that protocol: a configured local route, or the bundle of that name.
            usable = [route for route in served.routes if route.settings.kind == "local"] if served else []
            if served is None or not usable:
                served = self._bundle(model, any_task=True)
                usable = served.routes if served is not None else []
        else:
            served = served or self._bundle(model, any_task=False)
            usable = served.routes if served is not None else []
            if endpoint != EMBEDDINGS:
                usable = [route for route in usable if route.settings.kind != "local"]
        if served is None:
            raise unknown_model(model)
        if not usable:
            raise ApiError(
                400, f"model '{model}' does not offer {endpoint}", code="unsupported_endpoint", param="model"
            )  # fmt: skip
        return served, usable

    def _bundle(self, name: str, *, any_task: bool) -> ServedModel | None:
        """Return the model of a bundle that is served without being configured.

        Raises:
            NotReady, Unavailable: it may exist and cannot serve now.
        """
        if self._serving is None:
            return None
        try:
            entry = self._serving.entry(name)
        except NotFound:
            return None
        return self.routes.bundle(name) if any_task or entry.task == local.TASK else None

    def _choose(self, call: GatewayCall) -> tuple[ServedModel, Sequence[Route]]:
        try:
            served, usable = self._usable(call.endpoint, call.model)
        except ServingError:
            self.traffic.unrouted += 1
            raise
        if call.route is not None:
            usable = [route for route in usable if route.id == call.route]
            if not usable:
                self.traffic.unrouted += 1
                raise unknown_model(call.model)
        ordered = self.routes.order(served, usable)
        if not ordered:
            self.traffic.unrouted += 1
            raise self._cooling(call.model, usable)
        return served, ordered[:MAX_ROUTES_TRIED]

    def _cooling(self, model: str, usable: Sequence[Route]) -> ApiError:
        wait_s = max(1, int(self.routes.wait_s(usable)) + 1)
        return ApiError(
            503, f"every route of model '{model}' failed lately and is left alone; retry in {wait_s} s",
            code="route_cooling", headers=(("retry-after", str(wait_s)),),
        )  # fmt: skip

    # One call

    def _job(self, call: GatewayCall, request_id: str, *, streams: bool) -> Job:
        body = call.body if isinstance(call.body, bytes) else msgspec.json.encode(call.body)
        if call.endpoint in MODEL_ENDPOINTS:
            return Job(call, body, bodies.read_fields(body), request_id, streams)
        if infer_model(call.endpoint) is None:
            raise ApiError(404, f"there is no endpoint {call.endpoint}", code="unknown_url")
        return Job(call, body, {}, request_id, streams)

    async def _run(self, job: Job) -> UpstreamAnswer | AnswerStream:
        served, ordered = self._choose(job.call)
        best: UpstreamAnswer | None = None
        for route in ordered:
            # Others may have found out meanwhile; the first attempt was admitted in this very step.
            if best is not None and not self.routes.admits(route):
                continue
            if best is not None:
                self.traffic.failovers += 1
            answer = await self._attempt(served, route, job)
            if isinstance(answer, AnswerStream) or not _may_move_on(answer):
                return answer
            best = answer if best is None or best.sent is Sent.NOT_SENT else best
        assert best is not None
        return best

    async def _attempt(self, served: ServedModel, route: Route, job: Job) -> UpstreamAnswer | AnswerStream:
        """Make one attempt; the route is counted from here until the last byte."""
        batch = job.call.batch
        lease = self.routes.enter(served, route, batch=batch)
        outcome: Outcome = "cancelled"
        try:
            if route.endpoint is None:
                answer = await self._ask_worker(route, job)
            else:
                found = await self._ask_upstream(route, job, lease)
                if isinstance(found, AnswerStream):
                    outcome = "ok"
                    return found
                answer = found
            outcome = outcome_of(answer)
            lease.tell(_event_of(answer))
            if answer.ok:
                lease.answered()
            if answer.status in DECLINING:
                self.routes.rest(route, answer.retry_after_s)
            return answer
        except UpstreamFailure as failure:
            answer = failed_answer(failure, route, job.request_id)
            outcome = outcome_of(answer)
            lease.tell(Event.FAILED)
            return answer
        finally:
            if not lease.handed_over:
                self.traffic.count(route, outcome, batch=batch)
                lease.close()

    async def _ask_upstream(self, route: Route, job: Job, lease: Lease) -> UpstreamAnswer | AnswerStream:
        assert route.endpoint is not None
        call, settings = job.call, route.settings
        body = bodies.request_body(
            job.body,
            job.fields,
            model=call.model,
            upstream_model=route.upstream_model,
            # A hint is set for one route by whoever knows its server, and is no client's wish.
            priority=call.priority if settings.kind in PRIORITY_KINDS else None,
            keep_priority=self._allow_client_priority and settings.supports_priority and not call.batch,
            streams=job.streams,
        )
        started_ns = self._clock_ns()
        response = await self._client.post(
            route.endpoint,
            call.endpoint.removeprefix("/v1"),
            body,
            _request_headers(route, job),
            timeout_s=self._timeout_s(route, call, started_ns),
            connect_timeout_s=settings.connect_timeout_seconds,
        )
        try:
            self.traffic.answered(route, self._clock_ns() - started_ns)
            if response.status == 200 and job.streams and response.content_type.startswith("text/event-stream"):
                headers = upstream_errors.passed_headers(response.headers)
                return AnswerStream(response, lease, job, headers, self.traffic)
            content = await response.read()
        finally:
            if not lease.handed_over:
                response.close()
        return complete_answer(route, job, response, content, self._wall_clock_s())

    async def _ask_worker(self, route: Route, job: Job) -> UpstreamAnswer:
        assert self._serving is not None, "a local route in a process without a worker"
        call = job.call
        now_ns = self._clock_ns()
        deadline_ns = now_ns + int(self._timeout_s(route, call, now_ns) * 1e9)
        if call.endpoint == EMBEDDINGS:
            told = await local.embed(
                self._serving, route.upstream_model, call.model, job.fields, now_ns, deadline_ns, background=call.batch
            )
        else:
            told = await local.infer(
                self._serving, route.upstream_model, job.body, now_ns, deadline_ns, background=call.batch
            )
        self.traffic.answered(route, self._clock_ns() - now_ns)
        return UpstreamAnswer(
            told.status, told.body, route.id, told.sent, job.request_id, code=told.code, usage=told.usage,
            retry_after_s=upstream_errors.retry_after_s({n.lower(): v for n, v in told.headers}, 0),
            headers=told.headers,
        )  # fmt: skip

    def _timeout_s(self, route: Route, call: GatewayCall, now_ns: int) -> float:
        timeout_s: float = route.settings.timeout_seconds
        if call.deadline_ns is not None:
            timeout_s = min(timeout_s, max(0.001, (call.deadline_ns - now_ns) / 1e9))
        return timeout_s


def _may_move_on(answer: UpstreamAnswer) -> bool:
    if answer.sent is Sent.NOT_SENT:
        return answer.status in _BROKEN
    return answer.sent is Sent.DECLINED


def _event_of(answer: UpstreamAnswer) -> Event:
    return Event.FAILED if answer.status in _BROKEN else Event.SUCCEEDED


def _request_headers(route: Route, job: Job) -> dict[str, str]:
    headers = {
        "Accept": "text/event-stream" if job.streams else "application/json",
        "X-Request-Id": job.request_id,
        BATCH_HEADER: "batch" if job.call.batch else "live",
        **dict(job.call.trace),
    }
    if route.api_key:
        headers["Authorization"] = f"Bearer {route.api_key}"
    return headers
