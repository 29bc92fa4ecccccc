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
import secrets
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
    """Plans and timing caches in a directory, shared by processes.

    Args:
        directory: made when something is stored; None keeps nothing.
        built: looked into as well and never written: what was built ahead of time, maybe on a read-only disk.
    """

    def __init__(self, directory: Path | None, built: Path | None = None) -> None:
        self._directory = directory
        self._places = [place for place in (directory, built) if place is not None]

    def load(self, model: str, facts: Facts) -> Cached | None:
        """Return the plan for exactly these facts, or None, with a log line that says which fact changed."""
        name = _plan_name(model, facts)
        for place in self._places:
            found = _read(place / name)
            if found is not None and found[0]["facts"] == dict(facts):
                with contextlib.suppress(OSError):
                    os.utime(place / name)
                return Cached(found[1], bool(found[0]["outside"]), str(found[0]["reason"]))
        for place in self._places:
            if _tell_why(place, model, facts):
                break
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
        line = json.dumps(header, sort_keys=True).encode() + b"\n"
        _write(self._directory / _plan_name(model, facts), line + cached.plan)
        for path in _plans(self._directory, model)[MAX_PLANS_PER_MODEL:]:
            with contextlib.suppress(OSError):
                path.unlink()

    def load_timing(self, facts: Facts) -> bytes:
        """Return kernel measurements of earlier builds for this library and device; empty if there are none."""
        for place in self._places:
            with contextlib.suppress(OSError):
                return (place / _timing_name(facts)).read_bytes()
        return b""

    def store_timing(self, facts: Facts, blob: bytes) -> None:
        """Keep measurements for later builds."""
        if self._directory is not None:
            _write(self._directory / _timing_name(facts), blob)


def _plan_name(model: str, facts: Facts) -> str:
    return f"{file_stem(model)}.{digest(facts)}{PLAN_SUFFIX}"


def _timing_name(facts: Facts) -> str:
    return f"{digest(timing_facts(facts))}{TIMING_SUFFIX}"


def _tell_why(directory: Path, model: str, facts: Facts) -> bool:
    """Log in which facts the newest other plan differs; return whether there was one."""
    for path in _plans(directory, model):
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
            return True
    return False


def _plans(directory: Path, model: str) -> list[Path]:
    """Return a model's plans, newest first."""
    found: list[tuple[float, Path]] = []
    stem = file_stem(model)
    for path in directory.glob(f"{stem}.*{PLAN_SUFFIX}"):
        # The stem of one model may be the beginning of another's.
        if path.name.removesuffix(PLAN_SUFFIX).rpartition(".")[0] == stem:
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not a temporary file of the library's: those are readable by their owner only, and plans travel.
        part = path.parent / f".{path.name}.{secrets.token_hex(8)}.part"
        try:
            part.write_bytes(data)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
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
