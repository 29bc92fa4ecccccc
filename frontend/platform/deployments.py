"""Routes by id, as this process is configured, and the bundles it serves beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from frontend.batches.scheduling.settings_document import RouteFacts, supports_priority
from frontend.gateway_settings import GatewaySettings, RouteSettings
from frontend.openai.addresses import metrics_url
from frontend.openai.errors import ApiError
from frontend.openai.routes import LOCAL_PREFIX, endpoint_of
from frontend.platform.read_models import Deployment


class Deployments:
    """All routes; ``bundles`` gives the names of what our own worker serves now."""

    def __init__(self, settings: GatewaySettings, bundles: Callable[[], Iterable[str]]) -> None:
        self._bundles = bundles
        development = settings.development
        self._configured = {
            route.id: _configured(model.name, route, development=development)
            for model in settings.models
            for route in model.routes
        }
        self._metrics_urls = frozenset(one.metrics_url for one in self._configured.values() if one.metrics_url)

    def all(self) -> tuple[Deployment, ...]:
        """Return every route: configured ones in their order, then bundles by name."""
        own = sorted(set(self._bundles()))
        return (
            *self._configured.values(),
            *(_bundle(name) for name in own if _bundle(name).id not in self._configured),
        )

    def find(self, route_id: str) -> Deployment | None:
        """Return a route, None if it is not configured."""
        found = self._configured.get(route_id)
        if found is None and route_id.startswith(LOCAL_PREFIX):
            name = route_id.removeprefix(LOCAL_PREFIX)
            found = _bundle(name) if name in set(self._bundles()) else None
        return found

    def facts(self, deployment: Deployment) -> RouteFacts:
        """Return what checks of settings need to know of a route."""
        return RouteFacts(deployment.id, deployment.kind or "", self._metrics_urls)

    def model_of(self, route_id: str) -> str:
        """Return the public model of a route, the route's id if it is not known here (any more)."""
        found = self._configured.get(route_id)
        return found.model if found is not None else route_id.removeprefix(LOCAL_PREFIX)


def no_deployment() -> ApiError:
    """Return the refusal of a route that nothing is known of."""
    return ApiError(404, "no such deployment", param="deployment")


def removed(route_id: str) -> Deployment:
    """Return what is left of a route that is not configured any more."""
    return Deployment(route_id, route_id, None, "", None, priority_supported=False, configured=False)


def _configured(model: str, route: RouteSettings, *, development: bool) -> Deployment:
    endpoint = None if route.kind == "local" else endpoint_of(route, development=development)
    return Deployment(
        id=route.id,
        model=model,
        kind=route.kind,
        endpoint="" if endpoint is None else endpoint.url,
        # Metrics are read over pinned addresses only; a public name without any cannot be.
        metrics_url=metrics_url(endpoint.url) if endpoint is not None and endpoint.addresses else None,
        priority_supported=supports_priority(route.kind),
    )


def _bundle(name: str) -> Deployment:
    return Deployment(LOCAL_PREFIX + name, name, "local", "", None, priority_supported=False)
