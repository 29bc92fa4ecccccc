"""Sizes and names that keep files readable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from source_tree import ROOT, shown, sources, tree

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


def test_files_are_short() -> None:
    lengths = {shown(file): len(file.read_text().splitlines()) for file in sources()}
    assert {file: lines for file, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    lengths = {
        f"{shown(file)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for file in sources()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {function: lines for function, lines in lengths.items() if lines >= MAX_FUNCTION_LINES} == {}


def test_package_files_are_empty() -> None:
    assert [shown(file) for file in sources() if file.name == "__init__.py" and file.read_text().strip()] == []


def test_no_file_is_named_for_nothing() -> None:
    names = set()
    for file in sources():
        parts = {part.lower() for part in file.relative_to(ROOT).with_suffix("").parts}
        names |= {shown(file)} if parts & FORBIDDEN_NAMES else set()
    assert names == set()


def test_every_file_says_what_it_is_for() -> None:
    silent = [shown(file) for file in sources() if file.name != "__init__.py" and ast.get_docstring(tree(file)) is None]
    assert silent == []


def test_annotations_are_not_evaluated() -> None:
    line = "from __future__ import annotations"
    assert [shown(file) for file in sources() if file.name != "__init__.py" and line not in file.read_text()] == []


def test_test_files_have_names_of_their_own() -> None:
    seen: dict[str, Path] = {}
    twice = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        if file.name != "conftest.py":
            twice += [(shown(file), shown(seen[file.name]))] if file.name in seen else []
            seen[file.name] = file
    assert twice == []


@pytest.mark.parametrize("folder", ["scripts", "tests"])
def test_nothing_imports_scripts_or_tests(folder: str) -> None:
    guilty = [
        shown(file)
        for file in sources()
        for node in ast.walk(tree(file))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == folder)
        or (isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == folder for alias in node.names))
    ]
    assert guilty == []
