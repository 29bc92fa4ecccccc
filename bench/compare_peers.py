"""Measure our server beside the ones a user would choose instead, in one session, in alternation.

    .venv/bin/python bench/compare_peers.py                      everything, 5 passes: more than an hour on two cores
    .venv/bin/python bench/compare_peers.py --quick              mlp_a and mlp_b, within 4 minutes once installed
    .venv/bin/python bench/compare_peers.py --peers mosec triton --models mlp_b --concurrency 1 64 --passes 5

Installs each peer into an environment of its own under PEERS_HOME (default: the user's cache); see
``bench/peers/servers.py`` for how each is set up. Only loopback, every run bounded, one comparison at a time. Writes
JSON, Markdown and PNG plots to bench/results, and the newest whole run into bench/README.md. Load comes from wrk and
h2load (installed with apt-get when run as root).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bench.peers import install, report, servers
from bench.peers.models import MODELS
from bench.peers.session import Scope, Session

QUICK_BUDGET_S = 180.0
MAX_PASSES = 50
MAX_SECONDS = 120
MARKER = "compare_peers"
FAMILIES = {"triton": ("triton-w0", "triton-w1ms")}


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; wrong values end the program with a usage message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name in servers.PEERS if name != servers.OURS]
    parser.add_argument("--quick", action="store_true", help="1 s a point, mlp_a and mlp_b, as many passes as fit")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="default: all, with --quick mlp_a and mlp_b")
    parser.add_argument("--peers", nargs="+", choices=[*names, *FAMILIES], help="default: all; ours always takes part")
    parser.add_argument("--concurrency", nargs="+", type=int, help="callers, for all models but the 3 MiB one")
    parser.add_argument("--passes", type=int, help="default 5, with --quick 3")
    parser.add_argument("--seconds", type=int, help="a point; default 3, with --quick 1")
    parser.add_argument("--open-loop", type=float, help="seconds of open loop; default 60, with --quick 0 (none)")
    parser.add_argument("--malformed", type=float, help="seconds beside a bad client; default 4, with --quick 0 (none)")
    parser.add_argument("--home", type=Path, default=install.default_home(), help="PEERS_HOME (default %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="default %(default)s")
    parser.add_argument("--urgent", action="store_true", help="run ahead of the machine's other work; needs root")
    parser.add_argument("--readme", action="store_true", help="put a quick or partial run into bench/README.md too")
    arguments = parser.parse_args(argv)
    for name, most in (("passes", MAX_PASSES), ("seconds", MAX_SECONDS)):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= most:
            parser.error(f"--{name} from 1 to {most}, not {value}")
    if arguments.concurrency and not all(1 <= level <= 1024 for level in arguments.concurrency):
        parser.error("--concurrency from 1 to 1024")
    return arguments


def scope_of(arguments: argparse.Namespace) -> Scope:
    """Return what the arguments ask for."""
    quick = arguments.quick
    peers = [servers.OURS]
    for name in arguments.peers or [name for name in servers.PEERS if name != servers.OURS]:
        peers += FAMILIES.get(name, (name,))
    return Scope(
        peers=tuple(dict.fromkeys(peers)),
        models=tuple(arguments.models or (("mlp_a", "mlp_b") if quick else MODELS)),
        concurrency=tuple(sorted(arguments.concurrency or ((1, 64) if quick else (1, 16, 64)))),
        big_concurrency=(1, 4),
        passes=arguments.passes or (3 if quick else 5),
        seconds=arguments.seconds or (1 if quick else 3),
        short=quick,
        budget_s=QUICK_BUDGET_S if quick else 0.0,
        open_loop_s=_given(arguments.open_loop, 0.0 if quick else 60.0),
        malformed_s=_given(arguments.malformed, 0.0 if quick else 4.0),
    )


@contextlib.contextmanager
def alone(home: Path) -> Iterator[None]:
    """Hold the lock of a PEERS_HOME; two comparisons at once would measure each other."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise SystemExit(f"another comparison is running (process {lock.read().strip() or '?'})") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def take_precedence() -> None:
    """Run this process and all that it starts at the highest ordinary priority, generators and servers alike.

    In a scheduling group of its own, since a nice value counts only inside one. A group belongs to a session, so unless
    this process leads one, a new one is started in its place.

    Raises:
        SystemExit: not permitted; or, in the process that was called, with the other's status.
    """
    if os.getpid() != os.getsid(0):
        # Not a fork: threads that libraries have started would be missing in it.
        with subprocess.Popen([sys.executable, *sys.argv], start_new_session=True) as process:
            try:
                raise SystemExit(process.wait())
            except BaseException:
                process.terminate()
                raise
    try:
        Path("/proc/self/autogroup").write_text("-19")
        os.nice(-19)
    except OSError as error:
        raise SystemExit(f"--urgent: {error}") from error


def machine() -> dict[str, Any]:
    """Return what a reader must know of where this ran."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")
    return {
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "python": sys.version.split()[0],
        "hot_path": "interpreted" if servers.served_tree() == ROOT else "compiled",
        "onnxruntime": importlib.metadata.version("onnxruntime"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    """Measure, write, print; 1 if our own server could not be measured."""
    arguments = parse(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    if arguments.urgent:
        take_precedence()
    with alone(arguments.home):
        session = Session(arguments.home, scope_of(arguments))
        session.result["machine"] = machine() | {"urgent": arguments.urgent}
        began = time.monotonic()
        try:
            session.run()
        finally:
            session.result["machine"]["load_after"] = round(os.getloadavg()[0], 2)
            session.result["machine"]["minutes"] = round((time.monotonic() - began) / 60, 1)
            if session.result["points"]:
                write(session.result, arguments)
    return 0 if report.select(session.result["points"], peer=servers.OURS) else 1


def write(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write what was measured, as far as it came."""
    name = MARKER + ("_quick" if arguments.quick else "")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = report.document(result)
    (arguments.out / f"{name}.md").write_text(text)
    print(text)
    try:
        from bench import plot

        plot.draw(result, arguments.out, name)
    except ImportError as error:
        print(f"no plots: {error}; pip install 'ringserve[bench]'", file=sys.stderr)
    partial = arguments.quick or arguments.peers or arguments.models or arguments.concurrency
    if arguments.readme or not partial:
        readme = ROOT / "bench" / "README.md"
        readme.write_text(report.replace_section(readme.read_text(), MARKER, text))


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


if __name__ == "__main__":
    sys.exit(main())
