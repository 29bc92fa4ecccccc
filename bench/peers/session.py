"""One comparison: every server takes its turn in every pass, on a machine where nothing else of ours runs.

Order: model by model; within a model pass by pass, server by server (A B C A B C ...), so that a change of the
machine's speed meets all of them. Idle servers that cost nothing stay up between their turns; those that take processor
time while idle are stopped, and started anew for each turn. Answers are checked before the load of every turn.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import extras, generators, install, models, probe, processes, servers
from bench.peers.generators import LoadFailed
from bench.peers.install import NotInstalled
from bench.peers.models import Spec
from bench.peers.probe import WrongAnswer
from bench.peers.servers import NotStarted, Peer, Running

IDLE_CORES = 0.02
"""More than this while nobody asks, and a server is not left running beside others."""
IDLE_WATCH_S = 2.0
RAW_LOOP_S = 1.0
WARM_UP_S = 1


@dataclass(frozen=True)
class Scope:
    """What to measure.

    Attributes:
        budget_s: passes after the first are left out when the model's share of it is used up; 0: never.
        short: JSON and gRPC only at the largest concurrency, and servers that are slow to start once.
    """

    peers: tuple[str, ...]
    models: tuple[str, ...]
    concurrency: tuple[int, ...]
    big_concurrency: tuple[int, ...]
    passes: int
    seconds: int
    short: bool = False
    budget_s: float = 0.0
    open_loop_s: float = 0.0
    malformed_s: float = 0.0

    def points(self, peer: Peer, spec: Spec) -> list[tuple[str, int]]:
        """Return the (format, concurrency) pairs of one server's turn."""
        big = not spec.widths
        levels = self.big_concurrency if big else self.concurrency
        found = []
        for form in peer.formats:
            if (form == "shm" and not big) or (form.endswith("json") and big):
                continue
            main = form in ("raw", "v2bin", "shm") or form == peer.formats[0]
            found += [(form, level) for level in levels if main or not self.short or level == max(levels)]
        return found


class Session:
    """Runs a scope; ``result`` is JSON-ready and complete up to the last finished step at any time."""

    def __init__(self, home: Path, scope: Scope) -> None:
        self._home = home
        self._scope = scope
        self._up: dict[str, Running] = {}
        self._warm: set[tuple[str, str]] = set()
        self.result: dict[str, Any] = {
            "scope": asdict(scope), "points": [], "raw_loop": {}, "idle": {}, "unavailable": {}, "left_out": [],
            "open_loop": [], "malformed": [],
        }  # fmt: skip

    def run(self) -> None:
        """Measure everything; whatever happens, no server is left behind."""
        processes.adopt_orphans()
        peers = self._installed()
        try:
            for name in self._scope.models:
                self._model(models.MODELS[name], peers)
        finally:
            self._stop_all()

    def _installed(self) -> list[Peer]:
        found = []
        for name in self._scope.peers:
            peer = servers.PEERS[name]
            try:
                if peer.venv:
                    install.install(self._home, peer.venv)
            except NotInstalled as error:
                self._unavailable(name, f"not installed: {error}")
                continue
            found.append(peer)
        return found

    def _model(self, spec: Spec, peers: list[Peer]) -> None:
        began = time.monotonic()
        share_s = self._scope.budget_s / len(self._scope.models)
        path = models.write(spec, self._home / "models" / spec.name)
        expected = models.expected_of(path, models.row_of(spec))
        working = [peer for peer in peers if self._bring_up(peer, spec, path, expected)]
        self._note_idle()
        for number in range(self._scope.passes):
            pass_s = 0.0
            raw = models.raw_rows_per_s(path, spec, RAW_LOOP_S)
            self.result["raw_loop"].setdefault(spec.name, []).append(round(raw, 1))
            for peer in working:
                once = self._scope.short and peer.exclusive
                if number and once:
                    continue
                turn_began = time.monotonic()
                self._turn(peer, spec, path, expected, number)
                pass_s += 0.0 if once else time.monotonic() - turn_began
            if share_s and time.monotonic() - began + pass_s > share_s:
                break
        self._extras(spec, path, expected, working)
        self._stop_all()

    def _bring_up(self, peer: Peer, spec: Spec, path: Path, expected: np.ndarray) -> bool:
        """Start a server that may stay; return whether it takes part."""
        return peer.exclusive or self._start(peer, spec, path, expected) is not None

    def _start(self, peer: Peer, spec: Spec, path: Path, expected: np.ndarray) -> Running | None:
        _say(f"{spec.name}: starting {peer.name}")
        try:
            running = servers.start(peer, self._home, path, spec)
        except (NotStarted, OSError) as error:
            self._unavailable(f"{peer.name} {spec.name}", f"not started: {error}")
            return None
        self._up[peer.name] = running
        self._warm = {pair for pair in self._warm if pair[0] != peer.name}
        return running

    def _note_idle(self) -> None:
        """Measure what the servers take while nobody asks; stop those that take much."""
        before = {name: processes.cpu_seconds(running.members()) for name, running in self._up.items()}
        time.sleep(IDLE_WATCH_S)
        for name, running in list(self._up.items()):
            members = running.members()
            cores = (processes.cpu_seconds(members) - before[name]) / IDLE_WATCH_S
            self.result["idle"][name] = {
                "cores": round(cores, 3),
                "pss_mib": round(processes.memory_bytes(list(members)) / 2**20, 1),
                "processes": len(members),
                "ready_s": round(running.ready_s, 2),
            }
            if cores > IDLE_CORES:
                _say(f"{name} takes {cores:.2f} core while idle: stopped between its turns")
                self._stop(name)

    def _turn(self, peer: Peer, spec: Spec, path: Path, expected: np.ndarray, number: int) -> None:
        running = self._up.get(peer.name)
        stays = running is not None
        if running is not None and not running.alive():
            self._left_out(peer.name, spec.name, "", f"ended by itself:\n{running.tail()}")
            self._stop(peer.name)
            running = None
        if running is None:
            running = self._start(peer, spec, path, expected)
        if running is None:
            return
        verified: dict[str, bool] = {}
        for form, concurrency in self._scope.points(peer, spec):
            try:
                if form not in verified:
                    verified[form] = False
                    self._verify(running, spec, form, expected)
                    verified[form] = True
                if verified[form]:
                    self._point(running, spec, form, concurrency, number)
            except (WrongAnswer, LoadFailed, NotInstalled, OSError, ValueError) as error:
                self._left_out(peer.name, spec.name, f"{form} c={concurrency}", str(error))
        if not stays and (peer.exclusive or self.result["idle"].get(peer.name, {}).get("cores", 0) > IDLE_CORES):
            self._stop(peer.name)

    def _verify(self, running: Running, spec: Spec, form: str, expected: np.ndarray) -> None:
        if form == "shm":
            with probe.SharedRegion(running, spec) as region:
                region.verify(expected)
        else:
            probe.verify(running, spec, form, expected)

    def _point(self, running: Running, spec: Spec, form: str, concurrency: int, number: int) -> None:
        if form == "shm":
            with probe.SharedRegion(running, spec) as region:
                self._load(running, spec, region.payload, concurrency, number)
        else:
            self._load(running, spec, models.payload(spec, form), concurrency, number)

    def _load(self, running: Running, spec: Spec, payload: models.Payload, concurrency: int, number: int) -> None:
        name = running.peer.name
        main = payload.format in ("raw", "v2bin", "shm")
        if (name, payload.format) not in self._warm and (main or not self._scope.short):
            generators.run(running, payload, concurrency, WARM_UP_S)
        self._warm.add((name, payload.format))
        sample = generators.run(running, payload, concurrency, self._scope.seconds)
        point = {
            "model": spec.name, "peer": name, "format": payload.format, "concurrency": concurrency, "pass": number,
            "per_s": round(sample.per_s, 1), **asdict(sample),
        }  # fmt: skip
        self.result["points"].append(point)
        errors = f" ERRORS {sample.what_errors}" if sample.errors else ""
        _say(
            f"pass {number} {spec.name} {name} {payload.format} c={concurrency}: {sample.per_s:.0f}/s "
            f"p50 {sample.p50_ms:.2f} p99 {sample.p99_ms:.2f} ms server {sample.server_cores} cores{errors}"
        )

    def _extras(self, spec: Spec, path: Path, expected: np.ndarray, working: list[Peer]) -> None:
        """Open loop, and good callers beside a bad one: once each, after the passes."""
        for peer in working:
            wants_open = self._scope.open_loop_s and "v2bin" in peer.formats and spec.widths and peer.name != "inline"
            wants_malformed = self._scope.malformed_s and spec.name == "mlp_a" and peer.name != "inline"
            if not (wants_open or wants_malformed):
                continue
            running = self._up.get(peer.name) or self._start(peer, spec, path, expected)
            if running is None:
                continue
            if wants_open:
                found = extras.open_loop(running, spec, self._scope.open_loop_s)
                self.result["open_loop"].append({"peer": peer.name, "model": spec.name, **found})
                _say(f"open loop {spec.name} {peer.name}: {found}")
            if wants_malformed:
                told = extras.beside_malformed(running, spec, self._scope.malformed_s)
                self.result["malformed"].append({"peer": peer.name, "model": spec.name, **told})
                _say(f"beside malformed {spec.name} {peer.name}: {told}")
            if peer.exclusive:
                self._stop(peer.name)

    def _stop(self, name: str) -> None:
        self._up.pop(name).stop()

    def _stop_all(self) -> None:
        for name in list(self._up):
            self._stop(name)

    def _unavailable(self, name: str, why: str) -> None:
        _say(f"{name} {why}")
        self.result["unavailable"][name] = why

    def _left_out(self, peer: str, model: str, what: str, why: str) -> None:
        _say(f"{model} {peer} {what} left out: {why}")
        entry = {"peer": peer, "model": model, "what": what, "why": why}
        if entry not in self.result["left_out"]:
            self.result["left_out"].append(entry)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
