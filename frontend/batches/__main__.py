"""Entry of a batch runner: ``python -m frontend.batches --settings-fd N --link-fd M``, started by the node."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import socket
import sys

from frontend.batches.process import run
from frontend.batches.settings import BatchesSettings
from worker.channel.node_link import read_settings


def main(argv: list[str]) -> int:
    """Run batches until drained or until the node is gone; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m frontend.batches")
    parser.add_argument("--settings-fd", type=int, required=True)
    parser.add_argument("--link-fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    settings = read_settings(arguments.settings_fd, BatchesSettings)
    return run(settings, socket.socket(fileno=arguments.link_fd))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
