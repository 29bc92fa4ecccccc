"""``ringserve build``: a process of its own loads the compiler, so that this command never does."""

from __future__ import annotations

import os
import sys

from frontend.node.child import child_environment, python_command


def build(directory: str, *, numerics: str, gpu: int, force: bool) -> int:
    """Turn into the builder; its exit status is the command's."""
    options = ["--numerics", numerics, "--gpu", str(gpu), *(["--force"] if force else [])]
    command = [*python_command("worker.build"), directory, *options]
    sys.stdout.flush()
    os.execve(command[0], command, child_environment())
