"""``ringserve batches``: a batch runner started by hand, beside a node's own or on another machine."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from frontend.batches.process import run
from frontend.batches.settings import batches_settings
from frontend.cli import EXIT_USAGE
from frontend.commands.settings import load_settings


def run_batches(arguments: argparse.Namespace) -> int:
    """Run batches until SIGTERM or SIGINT; return the exit status."""
    loaded = load_settings(arguments, need_models=False)
    if loaded is None:
        return EXIT_USAGE
    settings = loaded.settings
    if not settings.gateway.runs_batches:
        print("ringserve: the gateway's batches are switched off in these settings", file=sys.stderr)
        return EXIT_USAGE
    sockets = tuple(os.path.join(settings.run_dir, f"{name}.sock") for name in settings.workers)
    # Only where a node runs: elsewhere there is no worker to wait for.
    present = sockets if all(map(os.path.exists, sockets)) else ()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    return run(batches_settings(settings, f"batches-{os.getpid()}", settings.run_dir, present), None)
