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


_BEGIN = (Milestone("(socket readable)", "frontend.httpd.protocol:Connection.data_received"),)
_PLACED = (
    Milestone("place in arena", "worker.channel.client:WorkerChannel.place", leave=True),
    Milestone("copy in", "worker.channel.client:WorkerChannel.submit"),
)
# Between two processes no moment may be taken that the other one need not wait for: a record is seen as soon as it is
# stored, whatever its writer still has to do. So ringing and waking are one stage.
_WORKER = (
    Milestone("push record", "worker.channel.ring:Producer.push", leave=True),
    Milestone("ring doorbell, wake worker", "worker.intake:Intake.read"),
    Milestone("worker intake", "worker.intake:Intake.read", leave=True),
    Milestone("queue", "worker.scheduling.scheduler:Scheduler.next"),
    Milestone("schedule", "worker.scheduling.scheduler:Scheduler.next", leave=True),
    Milestone("begin dispatch", "worker.dispatch:Dispatcher.begin"),
    Milestone("gather, stage", "worker.dispatch:Dispatcher.begin", leave=True),
    Milestone("hand to the device", "worker.dispatch:Dispatcher.execute"),
    Milestone("run", "worker.dispatch:Dispatcher.execute", leave=True),
    Milestone("back from the device", "worker.dispatch:Dispatcher.complete"),
    Milestone("scatter", "worker.dispatch:Dispatcher.complete", leave=True),
    Milestone("account", "worker.answers:Answers.succeed"),
    Milestone("write reply", "worker.answers:Answers.succeed", leave=True),
    Milestone("count", "worker.channel.channel:Channel.flush"),
    Milestone("publish reply", "worker.channel.ring:Producer.publish_words", leave=True),
    Milestone("ring doorbell, wake frontend", "worker.channel.client:WorkerChannel._on_doorbell"),
)

ORDINARY = (
    *_BEGIN,
    Milestone("parse HTTP", "frontend.kserve.http_routes:KserveApp.handle"),
    Milestone("route", "frontend.kserve.http_routes:decode_infer"),
    Milestone("decode body", "frontend.kserve.http_routes:decode_infer", leave=True),
    Milestone("begin request", "frontend.infer_call:check"),
    Milestone("checks", "frontend.infer_call:check", leave=True),
    Milestone("match variant, deadline", "worker.channel.client:WorkerChannel.place"),
    *_PLACED,
    *_WORKER,
    Milestone("collect", "frontend.infer_call:InferCall._on_reply"),
    Milestone("finish request", "frontend.kserve.http_routes:KserveApp._finish"),
    Milestone("begin answer", "frontend.kserve.http_routes:encode_infer"),
    Milestone("encode body", "frontend.kserve.http_routes:encode_infer", leave=True),
    Milestone("headers", "frontend.httpd.exchange:Exchange.respond"),
    Milestone("write to socket", "frontend.httpd.exchange:Exchange.respond", leave=True),
)
"""Of a request that is parsed, decoded and checked."""

REPEAT = (
    *_BEGIN,
    Milestone("recognise head", "frontend.kserve.http_routes:KserveApp._infer_again"),
    Milestone("recognise body", "frontend.placed_call:PlacedCall.start"),
    Milestone("begin request, deadline", "worker.channel.client:WorkerChannel.place"),
    *_PLACED,
    *_WORKER,
    Milestone("collect", "frontend.placed_call:PlacedCall._on_reply"),
    Milestone("finish request", "frontend.repeat_call:RepeatCall.answered"),
    Milestone("encode body", "frontend.httpd.exchange:Exchange.respond_ready"),
    Milestone("write to socket", "frontend.httpd.exchange:Exchange.respond_ready", leave=True),
)
"""Of a request that differs from an earlier one in its tensors' elements only."""

WAYS = {"repeat": REPEAT, "ordinary": ORDINARY}


def _places() -> tuple[tuple[str, bool], ...]:
    return tuple(dict.fromkeys((milestone.place, milestone.leave) for way in WAYS.values() for milestone in way))


PLACES = _places()
"""Every moment of any way once; events carry its position here."""
