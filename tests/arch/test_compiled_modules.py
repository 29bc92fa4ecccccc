"""What mypyc asks of the modules that are compiled, beyond what it says itself (scripts/compile.py)."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES: tuple[str, ...] = runpy.run_path(str(ROOT / "scripts" / "compile.py"))["MODULES"]
OURS = sorted(path for package in ("engines", "worker", "frontend") for path in (ROOT / package).rglob("*.py"))


def classes(path: Path) -> Iterator[ast.ClassDef]:
    """Yield a file's classes."""
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def imported(path: Path) -> dict[str, str]:
    """Return the file's imported names, each with its module as a path."""
    tree = ast.parse(path.read_text())
    return {
        alias.asname or alias.name: (node.module or "").replace(".", "/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_every_module_is_there() -> None:
    assert len(set(MODULES)) == len(MODULES)
    assert [module for module in MODULES if not (ROOT / f"{module}.py").is_file()] == []


def test_no_interpreted_class_inherits_from_a_compiled_one() -> None:
    # It would raise TypeError, where the class is made: often long after the start.
    found = []
    for path in OURS:
        if path.relative_to(ROOT).with_suffix("").as_posix() not in MODULES:
            names = imported(path)
            for node in classes(path):
                bases = {names.get(base.id) for base in node.bases if isinstance(base, ast.Name)}
                found += [f"{node.name} of {path.relative_to(ROOT)}"] if bases & set(MODULES) else []
    assert found == []


def test_no_default_of_a_protocol_is_left_to_the_class() -> None:
    # mypyc (2.4) forgets ``x: SomeProtocol | None = None`` in a class's body: set it in ``__init__``.
    protocols = {
        node.name
        for path in OURS
        for node in classes(path)
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)
    }
    found = [
        f"{module}: {node.name}.{ast.unparse(line.target)}"
        for module in MODULES
        for node in classes(ROOT / f"{module}.py")
        if not node.decorator_list
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant) and line.value.value is None
        if {name.id for name in ast.walk(line.annotation) if isinstance(name, ast.Name)} & protocols
    ]
    assert found == []


def test_no_object_is_made_past_its_constructor() -> None:
    found = [
        module for module in MODULES if ".__new__(" in (ROOT / f"{module}.py").read_text().replace("object.__new__", "")
    ]
    assert found == []
