"""In which order the routes of a model are tried. Pure.

``ordered``: as written. ``least_in_flight``: fewest calls under way per weight. ``weighted``: each call goes to the
route that is furthest behind its share (stride scheduling: every call a route takes moves its mark on by 1 / weight,
the lowest mark is next), which spreads evenly without random numbers.

Routes that an upstream asked to leave alone (429, 503) come last, in the same order: another route is better than a
busy one, a busy one better than none. Routes with an open breaker do not take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from frontend.gateway_settings import Routing


@dataclass(frozen=True, slots=True)
class Candidate:
    """A route as the policy sees it.

    Attributes:
        in_flight: calls under way, live and of batch jobs.
        mark: of stride scheduling, see ``moved``.
        admits: its breaker lets a call through.
        resting: its upstream asked for a pause that is not over.
    """

    weight: float
    in_flight: int = 0
    mark: float = 0.0
    admits: bool = True
    resting: bool = False


def order(candidates: Sequence[Candidate], routing: Routing) -> list[int]:
    """Return the indexes of the routes to try, best first; ties go to the one written first."""
    usable = [index for index, candidate in enumerate(candidates) if candidate.admits]
    match routing:
        case "ordered":
            pass
        case "weighted":
            usable.sort(key=lambda index: candidates[index].mark)
        case "least_in_flight":
            usable.sort(key=lambda index: (candidates[index].in_flight + 1) / candidates[index].weight)
        case _:
            assert_never(routing)
    return sorted(usable, key=lambda index: candidates[index].resting)


def moved(mark: float, weight: float, current: float) -> float:
    """Return the mark of a route that takes a call.

    Args:
        current: the highest mark at which a call of the model was taken so far; a route that was away starts from
            there, so that it is not flooded with everything it missed.
    """
    return max(mark, current) + 1.0 / weight
