"""What becomes of a call: one complete answer, or a stream of pieces."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from engines.errors import ServingError
from frontend.openai import bodies, upstream_errors
from frontend.openai.bodies import Fields
from frontend.openai.breaker_state import Event
from frontend.openai.calls import GatewayCall, Sent, UpstreamAnswer
from frontend.openai.errors import ApiError, error_body, render, type_of
from frontend.openai.routes import Lease, Route
from frontend.openai.series import GatewayTraffic, Outcome
from frontend.openai.upstream import UpstreamFailure, UpstreamResponse

DECLINING: Final = (429, 503)
"""Statuses by which a server says that it did not run a call because it has too much to do."""


@dataclass(slots=True)
class Job:
    """A call with what is derived from it once."""

    call: GatewayCall
    body: bytes
    fields: Fields
    request_id: str
    streams: bool


class AnswerStream:
    """A streamed answer whose head has arrived. Read ``pieces`` to the end, or ``close``."""

    def __init__(
        self, response: UpstreamResponse, lease: Lease, job: Job, headers: tuple[tuple[str, str], ...],
        traffic: GatewayTraffic,
    ) -> None:  # fmt: skip
        self._response = response
        self._lease = lease
        self._job = job
        self._traffic = traffic
        self._outcome: Outcome = "cancelled"
        self.content_type = response.content_type
        self.headers = headers
        self.request_id = job.request_id
        self.upstream_request_id = upstream_id(response)
        lease.hand_over()
        lease.tell(Event.SUCCEEDED)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield bytes as they arrive; with a renamed model, as soon as their line is complete.

        Raises:
            ServingError: the upstream failed in the middle; what was yielded before stands.
        """
        rename = bodies.event_renamer(self._job.call.model, self._lease.route.upstream_model)
        try:
            async for piece in self._response.pieces():
                self._lease.answered()
                if renamed := rename(piece):
                    yield renamed
            if rest := rename(b""):
                yield rest
            self._outcome = "ok"
        except (UpstreamFailure, ApiError) as failure:
            self._outcome = "broken_stream"
            self._lease.tell(Event.FAILED)
            if isinstance(failure, ApiError):
                raise
            raise ApiError(failure.status, str(failure), code=failure.code) from failure
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the upstream, which sees at once that nobody waits; idempotent."""
        self._response.close()
        if self._lease.is_open:
            self._traffic.count(self._lease.route, self._outcome, batch=False)
            self._lease.close()


def complete_answer(route: Route, job: Job, response: UpstreamResponse, content: bytes, now_s: float) -> UpstreamAnswer:
    """Return an upstream's answer as a client gets it.

    Args:
        now_s: Unix time.
    """
    call, status = job.call, response.status
    headers = upstream_errors.passed_headers(response.headers)
    fields = bodies.answer_fields(content) if 200 <= status < 300 else None
    if fields is not None and not upstream_errors.error_in_success(fields):
        return UpstreamAnswer(
            status, bodies.answer_body(content, fields, model=call.model, upstream_model=route.upstream_model),
            route.id, Sent.ANSWERED, job.request_id, upstream_request_id=upstream_id(response), headers=headers,
            usage=bodies.usage_of(fields) if call.batch else None,
        )  # fmt: skip
    if 200 <= status < 300:
        # An error under a success, or no JSON at all: never passed on as a success (PI-11).
        what = "an error" if fields is not None else "something that is not JSON"
        told = upstream_errors.fault(f"the upstream answered {status} with {what}", "upstream_error")
    else:
        told = upstream_errors.normalise(
            status, response.content_type, content,
            model=call.model, upstream_model=route.upstream_model, endpoint=call.endpoint,
        )  # fmt: skip
    return UpstreamAnswer(
        told.status, told.body, route.id, Sent.DECLINED if status in DECLINING else Sent.ANSWERED, job.request_id,
        code=told.code, retry_after_s=upstream_errors.retry_after_s(response.headers, now_s),
        upstream_request_id=upstream_id(response),
        headers=headers if told.status == status else (("x-should-retry", "false"),),
    )  # fmt: skip


def failed_answer(failure: UpstreamFailure, route: Route, request_id: str) -> UpstreamAnswer:
    """Return the answer to a call that got none from its upstream."""
    body = error_body(str(failure), type_of(failure.status), None, failure.code)
    return UpstreamAnswer(failure.status, body, route.id, failure.sent, request_id, code=failure.code)


def refusal(error: ServingError, request_id: str) -> UpstreamAnswer:
    """Return a failure of the gateway itself as an answer: nothing was sent anywhere."""
    told = render(error)
    headers = {name.lower(): value for name, value in told.headers}
    return UpstreamAnswer(
        told.status, told.body, "", Sent.NOT_SENT, request_id, code=told.code, headers=told.headers,
        retry_after_s=upstream_errors.retry_after_s(headers, 0),
    )  # fmt: skip


def unknown_model(model: str) -> ApiError:
    """Return the error for a model that nobody serves."""
    return ApiError(404, f"The model '{model}' does not exist", code="model_not_found", param="model")


def new_request_id() -> str:
    """Return an id for a request that brought none."""
    return f"req_{secrets.token_hex(16)}"


def upstream_id(response: UpstreamResponse) -> str:
    """Return the upstream's own request id if it can be told safely, else nothing."""
    text = response.headers.get("x-request-id", "")
    return text if len(text) <= 128 and text.isascii() and text.isprintable() else ""
