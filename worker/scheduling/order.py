"""The model that comes first by a key that changes as its queue does, without looking at all models.

Theory
    A heap of keys, each ending with its model's id, and per model the one key in the heap that counts for it. A key
    that *falls* is pushed at once (``update``). A key that *rises* is corrected only when its old value surfaces, so a
    model's queue may change many times at no cost. Old entries differ from the one that counts; they are thrown away
    when they surface, and all at once when they are the majority. (A key that fell and came back may be there twice.)
"""

from __future__ import annotations

from collections.abc import Callable, Container
from heapq import heapify, heappop, heappush, heapreplace

Key = tuple[int, int, str, int]
"""Two ns times, a name, and the model's id."""

SWEEP_SLACK = 64
"""Old entries tolerated before a sweep."""


class LazyOrder:
    """Models by ascending key. ``key_of`` returns a model's key now, or None when it has nothing queued."""

    __slots__ = ("_counts", "_heap", "_key_of")

    def __init__(self, key_of: Callable[[int], Key | None]) -> None:
        self._key_of = key_of
        self._heap: list[Key] = []
        self._counts: dict[int, Key] = {}

    def update(self, key: Key) -> None:
        """Take note of a model's key. Must be called when the key fell or the model got its first request."""
        known = self._counts.get(key[3])
        if known is not None and known <= key:
            return
        self._counts[key[3]] = key
        heappush(self._heap, key)
        if len(self._heap) > 2 * len(self._counts) + SWEEP_SLACK:
            self._heap = list(self._counts.values())
            heapify(self._heap)

    def forget(self, model_id: int) -> None:
        """Drop a model."""
        self._counts.pop(model_id, None)

    def first(self) -> Key | None:
        """Return the least key, or None when no model has anything queued."""
        heap = self._heap
        while heap:
            key = heap[0]
            model_id = key[3]
            if self._counts.get(model_id) != key:
                heappop(heap)
                continue
            actual = self._key_of(model_id)
            if actual is None:
                heappop(heap)
                del self._counts[model_id]
            elif actual == key:
                return key
            else:
                heapreplace(heap, actual)
                self._counts[model_id] = actual
        return None

    def first_outside(self, passed_over: Container[int]) -> Key | None:
        """Return the least key of a model not in ``passed_over``; O(log n) for each passed over on the way."""
        aside: list[Key] = []
        found = self.first()
        while found is not None and found[3] in passed_over:
            aside.append(heappop(self._heap))
            found = self.first()
        for key in aside:
            heappush(self._heap, key)
        return found

    def held(self) -> int:
        """Return how many entries are held, old ones included."""
        return len(self._heap)
