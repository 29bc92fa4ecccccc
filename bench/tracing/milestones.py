"""The milestones of a request's way, in order: where each is passed, and what the time before it is called.

Standard library only: it is read by the driver and inside the traced processes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Milestone:
    """A moment at which a function is entered or left.

    Attributes:
        stage: what happened since the milestone before.
        place: ``module:attribute.path``; where a name was imported to counts, not where it is defined.
    """

    stage: str
    place: str
    leave: bool = False


MILESTONES = (
    Milestone("(socket readable)", "frontend.httpd.protocol:Connection.data_received"),
    Milestone("parse HTTP", "frontend.kserve.http_routes:KserveApp.handle"),
    Milestone("route", "frontend.kserve.http_routes:decode_infer"),
    Milestone("decode body", "frontend.kserve.http_routes:decode_infer", leave=True),
    Milestone("begin request", "frontend.infer_call:check"),
    Milestone("checks", "frontend.infer_call:check", leave=True),
    Milestone("match variant, deadline", "worker.channel.client:WorkerChannel.place"),
    Milestone("place in arena", "worker.channel.client:WorkerChannel.place", leave=True),
    Milestone("copy in", "worker.channel.client:WorkerChannel.submit"),
    Milestone("push record, ring doorbell", "worker.channel.client:WorkerChannel.submit", leave=True),
    Milestone("wake worker", "worker.intake:Intake.read"),
    Milestone("worker intake", "worker.intake:Intake.read", leave=True),
    Milestone("queue", "worker.scheduling.scheduler:Scheduler.next"),
    Milestone("schedule", "worker.scheduling.scheduler:Scheduler.next", leave=True),
    Milestone("begin dispatch", "worker.dispatch:Dispatcher.begin"),
    Milestone("gather, stage", "worker.dispatch:Dispatcher.begin", leave=True),
    Milestone("hand to the device", "worker.dispatch:Dispatcher.execute"),
    Milestone("run", "worker.dispatch:Dispatcher.execute", leave=True),
    Milestone("back from the device", "worker.dispatch:Dispatcher.complete"),
    Milestone("scatter", "worker.dispatch:Dispatcher.complete", leave=True),
    Milestone("account, write reply", "worker.channel.channel:Channel.flush"),
    Milestone("publish reply, ring doorbell", "worker.channel.channel:Channel.flush", leave=True),
    Milestone("wake frontend", "worker.channel.client:WorkerChannel._on_doorbell"),
    Milestone("collect", "frontend.kserve.http_routes:KserveApp._finish"),
    Milestone("finish request", "frontend.kserve.http_routes:encode_infer"),
    Milestone("encode body", "frontend.kserve.http_routes:encode_infer", leave=True),
    Milestone("headers", "frontend.httpd.exchange:Exchange.respond"),
    Milestone("write to socket", "frontend.httpd.exchange:Exchange.respond", leave=True),
)
