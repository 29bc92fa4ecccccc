"""``ringserve check``: a process of its own loads the engines, so that this command never does."""

from __future__ import annotations

import os
import sys

from frontend.node.child import child_environment, python_command


def check(directory: str, *, as_json: bool, backend: str = "auto") -> int:
    """Turn into the checker; its exit status is the command's."""
    options = [*(["--json"] if as_json else []), "--backend", backend]
    command = [*python_command("worker.check"), directory, *options]
    sys.stdout.flush()
    os.execve(command[0], command, child_environment())
