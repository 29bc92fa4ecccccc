"""A process as the node sees one: speaks the link, beats a pulse, and misbehaves on request.

Run as ``fake_child.py ROLE BEHAVIOURS ARGS...``; BEHAVIOURS is ``name=behaviour,...``, and ``@1`` limits one to the
first life.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time
from pathlib import Path

from worker.channel.node_link import (
    EXIT_CONFIG,
    EXIT_NODE_GONE,
    ChannelStatus,
    ModelStatus,
    Report,
    State,
    Status,
    SyncLink,
    die_with_node,
)
from worker.channel.pulse import Pulse
from worker.channel.series import Series


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("behaviours")
    parser.add_argument("--settings-fd", type=int)
    parser.add_argument("--link-fd", type=int)
    parser.add_argument("--pulse-fd", type=int)
    arguments = parser.parse_args()
    with open(arguments.settings_fd, "rb") as file:
        settings = json.load(file)
    name, run_dir = settings["name"], Path(settings["run_dir"])
    with (run_dir / f"{name}.lives").open("a+") as lives:
        lives.write("x")
        lives.seek(0)
        life = len(lives.read())
    behaviour = dict(pair.split("=") for pair in arguments.behaviours.split(",") if pair).get(name, "")
    behaviour, _, only = behaviour.partition("@")
    if only and life != int(only):
        behaviour = ""
    if behaviour == "config":
        print("nothing here can be served", flush=True)
        return EXIT_CONFIG
    if behaviour == "crash":
        return 3
    if behaviour == "talk":
        sys.stdout.write("half ")
        sys.stdout.flush()
        sys.stdout.write("a line\n" + "y" * 40_000 + "\nno newline at the end")
        sys.stdout.flush()
    if arguments.role == "worker":
        die_with_node(arguments.link_fd)
    link = SyncLink(arguments.link_fd)
    pulse = Pulse(arguments.pulse_fd) if arguments.pulse_fd is not None else None
    if behaviour == "gate" and life > 1:
        # Blocks until a test opens the other end.
        (run_dir / "gate").read_bytes()
    if behaviour == "garbage":
        os.write(link.fileno(), b"certainly not JSON\n")
    link.send(
        Report(state=State.DEGRADED, detail="model broken") if behaviour == "broken" else Report(state=State.READY)
    )
    if pulse is not None and behaviour == "hang":
        pulse.executing(time.monotonic_ns())
    if behaviour == "frozen":
        assert pulse is not None
        pulse.beat(time.monotonic_ns())
        link.send(Report(status=status_of(arguments.role, name)))
        time.sleep(600)
    return loop(link, pulse, arguments.role, name, life, behaviour)


def loop(link: SyncLink, pulse: Pulse | None, role: str, name: str, life: int, behaviour: str) -> int:
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    while True:
        if pulse is not None:
            pulse.beat(time.monotonic_ns())
        poll.poll(100)
        for order in link.receive():
            if order.do == "series":
                link.send(Report(series=series_of(role, name, life), id=order.id))
            elif order.do == "status":
                link.send(Report(status=status_of(role, name), id=order.id))
            elif behaviour == "stubborn":
                print("I would rather not", flush=True)
            else:
                return 0
        if link.gone:
            return EXIT_NODE_GONE


def series_of(role: str, name: str, life: int) -> tuple[Series, ...]:
    return (
        Series(name=f"{role}_requests_total", kind="counter", help="Requests.", labels={"model": "m"}, value=10),
        Series(name=f"{role}_in_flight", kind="gauge", help="In flight.", labels={"life": f"{name}-{life}"}, value=20),
        Series(
            name=f"{role}_wait_seconds", kind="histogram", help="Wait.", bounds=(0.1, 1.0), counts=(1, 2, 3), sum=5.5
        ),
    )


def status_of(role: str, name: str) -> Status:
    if role == "worker":
        return Status(models=(ModelStatus(name="m", version="1", state="READY", batch_sizes=(1, 8)),))
    channel = ChannelStatus(frontend=name, worker="worker0", in_flight=3, arena_bytes_used=0, arena_bytes=1 << 20)
    return Status(channels=(channel,))


if __name__ == "__main__":
    sys.exit(main())
