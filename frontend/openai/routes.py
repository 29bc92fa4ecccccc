"""Models, their routes, and what is under way on each: the mutable half of routing, for one process.

Counts are exact from a call's admission until the last byte of its answer, streams included; a call that moves on to
another route counts there. Batch lines count apart: live traffic alone is what they yield to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from frontend.gateway_settings import GatewayModel, GatewaySettings, RouteSettings, Routing
from frontend.openai import breaker_state, routing
from frontend.openai.addresses import Endpoint, read_endpoint
from frontend.openai.breaker_state import Breaker, Event

BUSY_REST_S: Final = 1.0
"""How long another route is preferred after a 429 or 503 that names no time."""
LOCAL_PREFIX: Final = "local."
"""Routes of bundles that are served without being configured: ``local.NAME``."""
OPENAI_ENDPOINT: Final = "https://api.openai.com/v1"
_CLOSED: Final = Breaker()


@dataclass(slots=True, eq=False)
class Route:
    """One route, with what this process knows of it now.

    Attributes:
        endpoint: None for ``local``.
        live, batch: calls under way.
        mark: see ``frontend.openai.routing``.
    """

    settings: RouteSettings
    model: str
    endpoint: Endpoint | None
    api_key: str = ""
    breaker: Breaker = _CLOSED
    rest_until_ns: int = 0
    live: int = 0
    batch: int = 0
    mark: float = 0.0

    @property
    def id(self) -> str:
        return self.settings.id

    @property
    def upstream_model(self) -> str:
        return self.settings.upstream_model or self.model

    def __repr__(self) -> str:
        return f"Route({self.id!r}, live={self.live}, batch={self.batch}, breaker={self.breaker.phase.name})"


@dataclass(slots=True)
class ServedModel:
    """A public model."""

    name: str
    routing: Routing
    routes: list[Route]
    current_mark: float = 0.0


class Lease:
    """A call's place on a route. ``close`` exactly once matters; further calls do nothing.

    Attributes:
        handed_over: a stream closes it, not the attempt that opened it.
    """

    __slots__ = ("_answered", "_batch", "_entered_ns", "_routes", "_told", "handed_over", "is_open", "route")

    def __init__(self, routes: Routes, route: Route, entered_ns: int, *, batch: bool) -> None:
        self._routes = routes
        self._batch = batch
        self._entered_ns = entered_ns
        self._answered = batch
        self.is_open = True
        self.handed_over = False
        self._told = False
        self.route = route

    def tell(self, event: Event) -> None:
        """Report what the call says about the route."""
        self._told = True
        self._routes.tell(self.route, event)

    def answered(self) -> None:
        """The first bytes of a live call's good answer are here; later ones change nothing."""
        if not self._answered:
            self._answered = True
            self._routes.answered(self.route, self._entered_ns)

    def hand_over(self) -> None:
        """From now on the answer's stream owns it."""
        self.handed_over = True

    def close(self) -> None:
        """The call is over."""
        if self.is_open:
            self.is_open = False
            if not self._told:
                self._routes.tell(self.route, Event.WITHDRAWN)
            self._routes.leave(self.route, batch=self._batch)


class Routes:
    """All routes of a process.

    Attributes:
        on_change: told of a route whose ``live`` has changed.
        on_answer: told of a route and the nanoseconds from a live call's admission to the first bytes of its answer.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        environ: Mapping[str, str],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._development = settings.development
        self._models = {model.name: self._served(model, environ) for model in settings.models}
        self._bundles: dict[str, ServedModel] = {}
        self._by_id = {route.id: route for model in self._models.values() for route in model.routes}
        self.on_change: Callable[[Route], None] = lambda route: None
        self.on_answer: Callable[[Route, int], None] = lambda route, waited_ns: None

    def model(self, name: str) -> ServedModel | None:
        """Return a configured model."""
        return self._models.get(name)

    def bundle(self, name: str) -> ServedModel:
        """Return the model of a bundle that is served without being configured; the caller knows that it exists."""
        found = self._bundles.get(name)
        if found is None:
            settings = RouteSettings(id=LOCAL_PREFIX + name, kind="local")
            found = self._bundles[name] = ServedModel(name, "ordered", [Route(settings, name, None)])
            self._by_id[settings.id] = found.routes[0]
        return found

    def names(self) -> list[str]:
        """Return the configured models."""
        return list(self._models)

    def all(self) -> Iterable[Route]:
        """Return every route there has been a call for, and every configured one."""
        return self._by_id.values()

    def route(self, route_id: str) -> Route | None:
        return self._by_id.get(route_id)

    def live(self, route_id: str) -> int:
        """Return how many live calls are under way on a route in this process."""
        route = self._by_id.get(route_id)
        return route.live if route is not None else 0

    def order(self, model: ServedModel, usable: Iterable[Route]) -> list[Route]:
        """Return the routes that may be tried now, best first; changes nothing."""
        now_ns = self._clock_ns()
        routes = list(usable)
        candidates = [
            routing.Candidate(
                route.settings.weight,
                route.live + route.batch,
                max(route.mark, model.current_mark),
                breaker_state.admits(route.breaker, now_ns),
                now_ns < route.rest_until_ns,
            )
            for route in routes
        ]
        return [routes[index] for index in routing.order(candidates, model.routing)]

    def wait_s(self, routes: Iterable[Route]) -> float:
        """Return in how many seconds the first of these breakers lets a call through."""
        now_ns = self._clock_ns()
        return min(breaker_state.wait_ns(route.breaker, now_ns) for route in routes) / 1e9

    def admits(self, route: Route) -> bool:
        return breaker_state.admits(route.breaker, self._clock_ns())

    def enter(self, model: ServedModel, route: Route, *, batch: bool) -> Lease:
        """Count a call in."""
        start = max(route.mark, model.current_mark)
        route.mark = routing.moved(route.mark, route.settings.weight, model.current_mark)
        model.current_mark = start
        if batch:
            route.batch += 1
        else:
            route.live += 1
            self.on_change(route)
        self.tell(route, Event.ADMITTED)
        return Lease(self, route, 0 if batch else self._clock_ns(), batch=batch)

    def answered(self, route: Route, entered_ns: int) -> None:
        """Note how long a live call waited for its answer; only a lease does."""
        self.on_answer(route, self._clock_ns() - entered_ns)

    def leave(self, route: Route, *, batch: bool) -> None:
        """Count a call out; only a lease does."""
        if batch:
            route.batch -= 1
        else:
            route.live -= 1
            self.on_change(route)
        assert route.live >= 0 <= route.batch, "a call was counted out twice"

    def tell(self, route: Route, event: Event) -> None:
        """Let the breaker know."""
        settings = route.settings
        route.breaker = breaker_state.after(
            route.breaker, event, self._clock_ns(), settings.failures_to_open, int(settings.cooldown_seconds * 1e9)
        )

    def rest(self, route: Route, seconds: float | None) -> None:
        """Prefer other routes for as long as the upstream asked, at most its cooldown."""
        pause_s = min(BUSY_REST_S if seconds is None else seconds, route.settings.cooldown_seconds)
        route.rest_until_ns = max(route.rest_until_ns, self._clock_ns() + int(pause_s * 1e9))

    def _served(self, model: GatewayModel, environ: Mapping[str, str]) -> ServedModel:
        return ServedModel(
            model.name, model.routing, [self._route(model.name, settings, environ) for settings in model.routes]
        )

    def _route(self, model: str, settings: RouteSettings, environ: Mapping[str, str]) -> Route:
        endpoint = None if settings.kind == "local" else endpoint_of(settings, development=self._development)
        api_key = environ.get(settings.api_key_env, "") if settings.api_key_env else ""
        return Route(settings, model, endpoint, api_key)


def endpoint_of(settings: RouteSettings, *, development: bool) -> Endpoint:
    """Return the approved endpoint of a route that is not local.

    Raises:
        NotApproved: it breaks a rule.
    """
    public = settings.kind == "openai"
    url = settings.endpoint or (OPENAI_ENDPOINT if public else "")
    return read_endpoint(url, settings.addresses, development=development, public_name=public)
