"""Built plans on disk, found by everything they depend on.

A plan is good for one network, one list of shapes, one set of options, one version of the library and one device. All
of those are *facts* in the plan's header; their digest is in its file's name, so a changed fact is simply another file.
Where weights are outside, their values are no fact: a retrained model of the same structure needs no new build.

File: one line of JSON (facts, sizes and checksum), then the plan. Written beside its place and renamed, so a reader
never sees half of one; a damaged file counts as absent. Nothing is cached if the directory cannot be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engines.tensorrt.network import file_stem

log = logging.getLogger("engines.tensorrt")

FORMAT: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20
MAX_PLANS_PER_MODEL: Final = 4
"""Plans kept per model name, newest first: its current one, and those of a rollback or a second device."""
PLAN_SUFFIX: Final = ".plan"
TIMING_SUFFIX: Final = ".timing"

Facts = Mapping[str, str]
"""What a plan depends on, by the word a person would use."""


@dataclass(frozen=True, slots=True)
class Cached:
    """A plan and what was noted when it was built."""

    plan: bytes
    outside: bool
    reason: str


class PlanCache:
    """Plans and timing caches in one directory, shared by processes.

    Args:
        directory: made when something is stored; None keeps nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def load(self, model: str, facts: Facts) -> Cached | None:
        """Return the plan for exactly these facts, or None, with a log line that says which fact changed."""
        if self._directory is None:
            return None
        path = self._path(model, facts)
        found = _read(path)
        if found is not None:
            header, plan = found
            if header["facts"] == dict(facts):
                with contextlib.suppress(OSError):
                    os.utime(path)
                return Cached(plan, bool(header["outside"]), str(header["reason"]))
        self._tell_why(model, facts)
        return None

    def store(self, model: str, facts: Facts, cached: Cached) -> None:
        """Keep a plan; a directory that cannot be written is logged, and costs a build at the next start."""
        if self._directory is None:
            return
        header = {
            "format": FORMAT,
            "facts": dict(facts),
            "outside": cached.outside,
            "reason": cached.reason,
            "bytes": len(cached.plan),
            "sha256": hashlib.sha256(cached.plan).hexdigest(),
        }
        self._write(self._path(model, facts), json.dumps(header, sort_keys=True).encode() + b"\n" + cached.plan)
        self._prune(model)

    def forget(self, model: str, facts: Facts) -> None:
        """Remove a plan that the library refused."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            self._path(model, facts).unlink()

    def load_timing(self, facts: Facts) -> bytes:
        """Return kernel measurements of earlier builds for this library and device; empty if there are none."""
        if self._directory is None:
            return b""
        try:
            return self._timing_path(facts).read_bytes()
        except OSError:
            return b""

    def store_timing(self, facts: Facts, blob: bytes) -> None:
        """Keep measurements for later builds."""
        if self._directory is None:
            return
        self._write(self._timing_path(facts), blob)

    def _path(self, model: str, facts: Facts) -> Path:
        assert self._directory is not None
        return self._directory / f"{file_stem(model)}.{digest(facts)}{PLAN_SUFFIX}"

    def _timing_path(self, facts: Facts) -> Path:
        assert self._directory is not None
        return self._directory / f"{digest(timing_facts(facts))}{TIMING_SUFFIX}"

    def _tell_why(self, model: str, facts: Facts) -> None:
        for path in self._plans(model):
            header = _read_header(path)
            if header is None:
                log.warning("tensorrt.plan_damaged file=%s: it will be built again", path)
                continue
            changed = [
                f"{word} {header['facts'].get(word, 'unknown')} -> {fact}"
                for word, fact in facts.items()
                if header["facts"].get(word) != fact
            ]
            if changed:
                log.info("tensorrt.plan_outdated model=%s file=%s changed=%s", model, path.name, "; ".join(changed))
                return

    def _plans(self, model: str) -> list[Path]:
        assert self._directory is not None
        found: list[tuple[float, Path]] = []
        stem = file_stem(model)
        for path in self._directory.glob(f"{stem}.*{PLAN_SUFFIX}"):
            # The stem of one model may be the beginning of another's.
            if path.name.removesuffix(PLAN_SUFFIX).rpartition(".")[0] == stem:
                with contextlib.suppress(OSError):
                    found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found, reverse=True)]

    def _prune(self, model: str) -> None:
        for path in self._plans(model)[MAX_PLANS_PER_MODEL:]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _write(self, path: Path, data: bytes) -> None:
        assert self._directory is not None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._directory, prefix=".", suffix=".part")
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(data)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            log.warning("tensorrt.not_cached file=%s reason=%s", path, error.strerror or error)


def digest(facts: Facts) -> str:
    """Return the part of a file's name that stands for the facts."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:24]


def timing_facts(facts: Facts) -> dict[str, str]:
    """Return the facts that measurements of kernels depend on: not the model."""
    return {word: facts[word] for word in ("library", "device") if word in facts}


def _read_header(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as stream:
            return _header(stream.readline(MAX_HEADER_BYTES))
    except OSError:
        return None


def _read(path: Path) -> tuple[dict[str, Any], bytes] | None:
    try:
        with path.open("rb") as stream:
            header = _header(stream.readline(MAX_HEADER_BYTES))
            plan = stream.read() if header is not None else b""
    except OSError:
        return None
    if header is None or len(plan) != header["bytes"] or hashlib.sha256(plan).hexdigest() != header["sha256"]:
        return None
    return header, plan


def _header(line: bytes) -> dict[str, Any] | None:
    try:
        header = json.loads(line)
    except ValueError:
        return None
    keys = {"format", "facts", "outside", "reason", "bytes", "sha256"}
    good = isinstance(header, dict) and keys <= header.keys() and header["format"] == FORMAT
    return header if good and isinstance(header["facts"], dict) else None
