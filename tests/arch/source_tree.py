"""The packages' source files, parsed once for the rules about them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engines", "worker", "frontend")


@cache
def sources() -> tuple[Path, ...]:
    """Return every Python file of the three packages."""
    return tuple(sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")))


@cache
def tree(file: Path) -> ast.Module:
    """Return the file's syntax tree."""
    return ast.parse(file.read_text(), str(file))


def imports(file: Path) -> Iterator[str]:
    """Yield the full name of every module that the file imports, wherever in the file."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def shown(file: Path) -> str:
    """Return the file's path within the repository."""
    return str(file.relative_to(ROOT))
