"""Entry of the worker process: ``python -m worker --settings-fd N --link-fd M [--pulse-fd P]``, started by the node."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import sys
from pathlib import Path

from engines.base import Engine
from engines.bundle.manifest import Manifest
from engines.device.errors import DeviceLost
from engines.errors import ServingError
from engines.select import EngineSet
from worker.channel.node_link import EXIT_CONFIG, SyncLink, die_with_node, read_settings
from worker.channel.pulse import Pulse
from worker.channel.server import ChannelServer
from worker.config import PLAN_FOLDER_OF_REPOSITORY, SchedulerSettings, WorkerSettings
from worker.loop import Loop
from worker.models import Loader
from worker.registry import Registry
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import Discipline, SchedulerOptions, Sizing

log = logging.getLogger("worker")

EXIT_DEVICE_LOST = 70
"""Unlike ``EXIT_CONFIG``, another process may do better: the node starts one."""
PLAN_FOLDER = "plans"
"""Under the run directory: what a library compiles for a device, found again at the next start."""
SWITCH_INTERVAL_S = 0.0005
"""How long the device thread may wait for the interpreter when it comes back from an execution: the default of 5 ms
would be longer than most executions."""


def main(argv: list[str]) -> int:
    """Serve until drained or until the node is gone; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m worker")
    parser.add_argument("--settings-fd", type=int, required=True)
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--pulse-fd", type=int)
    arguments = parser.parse_args(argv)
    faulthandler.enable()
    # The node decides when to stop: a terminal's Ctrl-C reaches the whole group, and only the node should act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_node(arguments.link_fd)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    settings = read_settings(arguments.settings_fd, WorkerSettings)
    link = SyncLink(arguments.link_fd)
    pulse = None if arguments.pulse_fd is None else Pulse(arguments.pulse_fd)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return _serve(settings, link, pulse)
    except DeviceLost as error:
        log.critical("worker.device_lost reason=%s", error)
        return EXIT_DEVICE_LOST
    except ServingError as error:
        log.error("worker.failed reason=%s", error)
        return EXIT_CONFIG


def _serve(settings: WorkerSettings, link: SyncLink, pulse: Pulse | None) -> int:
    engines = EngineSet(
        settings.runtime,
        settings.gpus,
        plan_dir=Path(settings.run_dir) / PLAN_FOLDER,
        built_dir=Path(settings.model_repo) / PLAN_FOLDER_OF_REPOSITORY,
    )
    engines.start()

    def engine_for(manifest: Manifest) -> Engine:
        return engines.choose(manifest.engine)

    loader = Loader(settings, engine_for)
    registry = Registry(loader.start())
    scheduler = Scheduler(options_of(settings.scheduler))
    socket_path = Path(settings.run_dir) / f"{settings.name}.sock"
    server = ChannelServer(str(socket_path), settings.channel, settings.generation)
    server.open()
    server.publish_models(registry.entries())
    # What is alive now lives for good; the collector need not walk it again on the hot path.
    gc.collect()
    gc.freeze()
    log.info("worker.started name=%s pid=%d", settings.name, os.getpid())
    try:
        status = Loop(settings.name, server, scheduler, registry, loader, link, pulse, engines=engines).run()
        if not link.gone and not loader.loading:
            # Otherwise something may still use a model; the end of the process gives its memory back just as well.
            for loaded in registry.all_loaded():
                loaded.model.close()
            engines.close()
        return status
    finally:
        server.close()


def options_of(settings: SchedulerSettings) -> SchedulerOptions:
    """Return the scheduler's options for settings whose names and units people write."""
    return SchedulerOptions(
        discipline=Discipline(settings.discipline),
        sizing=Sizing(settings.sizing),
        ema_halflife_ns=int(settings.ema_halflife_seconds * 1e9),
        recency_penalty_cap=settings.recency_penalty_cap,
        coalescing_discount=settings.coalescing_discount,
        cost_ema_alpha=settings.cost_ema_alpha,
        max_queue_depth=settings.max_queue_depth,
    )


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    # Not sys.exit: a loader or device thread may still be inside a library, and tearing its C++ statics down under it
    # aborts the process. Everything that outlives this process has been closed by now.
    os._exit(status)
