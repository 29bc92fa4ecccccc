"""The seam between a runner and whoever watches its routes."""

from __future__ import annotations

from typing import Protocol


class RouteObserver(Protocol):
    """Told what lines meet on their routes; called from the event loop."""

    def line(self, route_id: str, seconds: float) -> None:
        """A line has got an answer of its upstream."""
        ...

    def overload(self, route_id: str) -> None:
        """A line has got 429 or 503."""
        ...

    def hint_refused(self, route_id: str) -> None:
        """A line has failed because the server takes no priority hint."""
        ...

    def freed(self, route_id: str) -> None:
        """Lines of this process have ended in the store, so that there is room on the route."""
        ...

    def running(self, route_id: str) -> int:
        """Return how many lines ran on a route when they were last counted, in all processes; 0 if nobody counts."""
        ...


class Unobserved:
    """Provides ``RouteObserver`` where nobody watches."""

    def line(self, route_id: str, seconds: float) -> None:
        """Nobody wants to know."""

    def overload(self, route_id: str) -> None:
        """Nobody wants to know."""

    def hint_refused(self, route_id: str) -> None:
        """Nobody wants to know."""

    def freed(self, route_id: str) -> None:
        """Nobody wants to know."""

    def running(self, route_id: str) -> int:
        return 0
