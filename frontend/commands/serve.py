"""``ringserve serve``: runs a node in this process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys

from frontend.cli import EXIT_FAILED, EXIT_USAGE
from frontend.commands.settings import load_settings
from frontend.control.listener import ControlError
from frontend.node.output import Output, OutputHandler
from frontend.node.ports import PortError
from frontend.node.run_dir import RunDirError
from frontend.node.supervisor import Node

FLUSH_S = 2.0


def serve(arguments: argparse.Namespace) -> int:
    """Run a node until it is told to stop; return its exit status."""
    loaded = load_settings(arguments, need_models=True)
    if loaded is None:
        return EXIT_USAGE
    output = Output(sys.stderr.fileno())
    output.start()
    handler = OutputHandler(output)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        return asyncio.run(Node(loaded.settings, output, _announce).run())
    except (RunDirError, PortError, ControlError) as error:
        output.write([f"ringserve: {error}\n".encode()])
        return EXIT_FAILED
    finally:
        output.close(FLUSH_S)


def _announce(line: str) -> None:
    # Whoever started us may have closed our output; that is no reason to stop serving.
    with contextlib.suppress(OSError, ValueError):
        # One write, so that a log line on the same terminal cannot come between the line and its end.
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
