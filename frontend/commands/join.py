"""``ringserve frontend --attach``: becomes one more frontend of a running node."""

from __future__ import annotations

import os
import sys

import msgspec

from frontend.cli import EXIT_FAILED
from frontend.node.child import child_environment, python_command, settings_descriptor
from frontend.node.link import join_node


def join(run_dir: str) -> int:
    """Join the node of ``run_dir`` and turn into the frontend process; returns only when that fails."""
    run_dir = os.path.abspath(os.path.expanduser(run_dir))
    try:
        sock, settings = join_node(run_dir)
    except (OSError, msgspec.MsgspecError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        print(f"ringserve: cannot join the node of {run_dir}: {reason}", file=sys.stderr)
        return EXIT_FAILED
    settings_fd = settings_descriptor(settings)
    link_fd = sock.detach()
    for descriptor in (settings_fd, link_fd):
        os.set_inheritable(descriptor, True)
    command = [*python_command("frontend"), "--settings-fd", str(settings_fd), "--link-fd", str(link_fd)]
    sys.stdout.flush()
    # The same process from here on: the node knows this pid, and signals go to the frontend itself.
    os.execve(command[0], command, child_environment())
