"""One call of a model server as the gateway sees it, live or as a line of a batch job, and what became of it.

Theory of operation
    Live requests and lines share one path (``frontend.openai.execution``): the same body rewriting, the same upstreams,
    the same normalised errors, so that a line fails exactly as the interactive call would. They differ in two values:
    a line names its ``route`` (one attempt there, no fail-over) and says ``batch`` (not counted as live, marked
    as background work for our own worker).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from frontend.openai.principal import Principal

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
EMBEDDINGS: Final = "/v1/embeddings"
MODEL_ENDPOINTS: Final = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)
"""Endpoints that name their model in the body. ``/v2/models/M/infer`` names it in the path; see ``infer_model``."""


class Sent(Enum):
    """How far a call came. Decides who may send it again, and what a batch line that failed may claim."""

    NOT_SENT = "not_sent"
    """No upstream has seen a byte of it."""
    DECLINED = "declined"
    """The upstream answered 429 or 503: it says that it did not run."""
    MAYBE_RUN = "maybe_run"
    """It was sent; whether it ran is not known. Never sent again by the gateway itself."""
    ANSWERED = "answered"
    """The upstream gave its answer, which may be an error of its own."""


@dataclass(frozen=True, slots=True)
class GatewayCall:
    """What is to be done, and for whom.

    Attributes:
        endpoint: one of ``MODEL_ENDPOINTS``, or ``/v2/models/M/infer``.
        body: JSON as sent (preferred: it travels unchanged where nothing must be rewritten), or its decoded form.
        model: public name.
        principal: whose call it is.
        route: id of the only route it may take, with one attempt; None lets the routing policy choose.
        priority: written into the body for routes that support it; the client's own is taken out unless allowed.
        batch: a line of a batch job: never streamed, not live traffic, background work for our own worker.
        request_id: sent upstream and returned; made up if empty.
        deadline_ns: monotonic; None means the route's ``timeout_seconds`` alone.
        trace: further headers of the client that go upstream, such as ``traceparent``.
    """

    endpoint: str
    body: bytes | dict[str, Any]
    model: str
    principal: Principal
    route: str | None = None
    priority: int | None = None
    batch: bool = False
    request_id: str = ""
    deadline_ns: int | None = None
    trace: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the upstream counted them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """One complete answer, ready for a client: errors are in OpenAI's shape, the model has its public name.

    There is always one: failures of connections and timeouts come as 502, 503 or 504 with the body that a live client
    would get.

    Attributes:
        status: HTTP status.
        body: JSON.
        route: id of the route that answered last; empty if none was tried.
        sent: see ``Sent``.
        code: ``error.code`` of the body if ``status`` is not 2xx and it is text, else None.
        retry_after_s: what the upstream asked for, None if nothing.
        request_id: ours; ``upstream_request_id`` is the upstream's own, empty if it gave none.
        usage: None if the answer told none.
        headers: allowed headers of the upstream for a live client (rate limits and the like).
    """

    status: int
    body: bytes
    route: str
    sent: Sent
    request_id: str
    content_type: str = "application/json"
    code: str | None = None
    retry_after_s: float | None = None
    upstream_request_id: str = ""
    usage: Usage | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a call of a model would go now.

    Attributes:
        route: id of the route; empty if there is none to send to now.
        cooling_s: all routes are held back by their circuit breakers for this long; None if that is not the reason.
            With no route and None, the model is not served at all and a call fails with 404.
    """

    route: str
    cooling_s: float | None = None


class Executor(Protocol):
    """What runs calls; ``frontend.openai.execution.Gateway`` is the real one."""

    def plan(self, endpoint: str, model: str) -> Plan:
        """Return where the routing policy sends a call now; starts nothing and counts nothing."""
        ...

    async def reach(self, route: str) -> bool:
        """Return whether the server of a route accepts connections now, without sending anything.

        True also where that cannot be told without a call: our own worker, a route that has gone.
        """
        ...

    async def execute(self, call: GatewayCall) -> UpstreamAnswer:
        """Return the answer to a call that is not streamed; cancelling withdraws it from the upstream.

        Never raises for what a caller or an upstream did wrong: that is an answer, too.
        """
        ...


def infer_model(endpoint: str) -> str | None:
    """Return M of ``/v2/models/M/infer``, None for another endpoint."""
    head, _, rest = endpoint.partition("/v2/models/")
    model, _, tail = rest.rpartition("/infer")
    return model if not head and model and not tail and "/" not in model else None
