"""A batch runner process as the node starts it, its intervals a tenth as long: ``python quick_batches.py FD FD``."""

from __future__ import annotations

import logging
import socket
import sys

from frontend.batches.process import run
from frontend.batches.runner.timings import Timings
from frontend.batches.settings import BatchesSettings
from worker.channel.node_link import read_settings


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    settings = read_settings(int(sys.argv[1]), BatchesSettings)
    batches = settings.gateway.batches
    times = Timings(
        tick_s=0.1, pass_s=0.05, publish_s=0.05, heartbeat_s=0.3, access_s=0.5, reading_s=0.2,
        first_pause_s=0.1, retry_base_s=0.1, segment_lines=64, outage_first_s=0.02, outage_longest_s=0.2,
        lease_s=batches.lease_seconds, renew_s=batches.lease_renew_seconds,
    )  # fmt: skip
    return run(settings, socket.socket(fileno=int(sys.argv[2])), times)


if __name__ == "__main__":
    sys.exit(main())
