"""The model table as this frontend last heard it from the worker; lookups by name and version."""

from __future__ import annotations

from engines.errors import InvalidInput, NotFound, NotReady, Unavailable
from worker.channel.messages import ModelEntry

READY = "READY"
LOADING = "LOADING"


class ModelTable:
    """Replaced whole on every message, so a request sees one consistent table."""

    def __init__(self) -> None:
        self._entries: list[ModelEntry] = []
        self._by_version: dict[str, dict[str, ModelEntry]] = {}
        self._newest: dict[str, ModelEntry] = {}
        self._heard = False

    def update(self, entries: list[ModelEntry]) -> None:
        """Take over the worker's table."""
        by_version: dict[str, dict[str, ModelEntry]] = {}
        newest: dict[str, ModelEntry] = {}
        for entry in entries:
            by_version.setdefault(entry.name, {})[entry.version] = entry
            best = newest.get(entry.name)
            if entry.state == READY and (best is None or int(entry.version) > int(best.version)):
                newest[entry.name] = entry
        self._entries, self._by_version, self._newest = list(entries), by_version, newest
        self._heard = True

    def entries(self) -> list[ModelEntry]:
        return self._entries

    def unready(self) -> list[ModelEntry]:
        """Return the entries that keep the node from being ready."""
        return [entry for entry in self._entries if entry.state != READY]

    @property
    def heard(self) -> bool:
        """Whether the worker has ever sent a table."""
        return self._heard

    def versions(self, model: str) -> list[str]:
        """Return the ready versions, ascending; empty if none."""
        versions = self._by_version.get(model, {})
        return sorted((version for version, entry in versions.items() if entry.state == READY), key=int)

    def find(self, model: str, version: str = "") -> ModelEntry:
        """Return a version in any state; without a number the newest ready one, else the newest.

        Raises:
            NotFound, InvalidInput, Unavailable: as ``entry``.
        """
        if version and not (version.isascii() and version.isdigit()):
            raise InvalidInput(f"failed to get model version from specified version string '{version}': not a number")
        versions = self._by_version.get(model)
        if versions is None:
            if not self._heard:
                raise Unavailable("the worker is not attached yet; models are not known")
            raise NotFound(f"Request for unknown model: '{model}' is not found")
        if not version:
            return self._newest.get(model) or versions[max(versions, key=int)]
        found = versions.get(version) or versions.get(str(int(version)))
        if found is None:
            raise NotFound(f"Request for unknown model: '{model}' version {version} is not found")
        return found

    def entry(self, model: str, version: str = "") -> ModelEntry:
        """Return a READY version, the newest ready one without a number.

        Raises:
            NotFound: unknown model or version.
            InvalidInput: the version is not a number.
            NotReady: known but not serving; says the state and the reason.
            Unavailable: the worker never attached, so nothing is known.
        """
        if not version:
            newest = self._newest.get(model)
            if newest is not None:
                return newest
        found = self.find(model, version)
        if found.state != READY:
            reason = f": {found.reason}" if found.reason else ""
            raise NotReady(f"model '{model}' version {found.version} is not at ready state ({found.state}){reason}")
        return found
