"""A real node with fake children: ``fake_node.py BEHAVIOURS SERVE-ARGUMENTS...``."""

from __future__ import annotations

import sys
from pathlib import Path

from frontend import cli
from frontend.commands import serve
from frontend.node import supervisor

CHILD = Path(__file__).with_name("fake_child.py")


def main() -> int:
    behaviours = sys.argv[1]

    def command(role: str) -> list[str]:
        return [sys.executable, str(CHILD), role, behaviours]

    real = supervisor.Node
    serve.Node = lambda settings, output, announce: real(settings, output, announce, command)  # type: ignore[assignment,misc]
    return cli.main(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
