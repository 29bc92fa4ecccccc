"""One node with small models for every end-to-end test that does not harm it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import onnx_models
from node_models import rows_manifest, write_models
from real_node import Node, shared_memory_unchanged


@pytest.fixture(scope="session")
def few_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that loads in a moment, for tests that start nodes of their own."""
    root = tmp_path_factory.mktemp("few_models")
    for path in (onnx_models.affine(root / "affine", columns=4), onnx_models.slow(root / "slow", 20.0)):
        (path.parent / "manifest.yaml").write_text(rows_manifest())
    return root


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def node(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with shared_memory_unchanged(), Node(models, tmp_path_factory.mktemp("run")) as node:
        yield node


@pytest.fixture(scope="session")
def ports(node: Node) -> dict[str, int]:
    return node.ports


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-kills", action="store_true", help="100 kills of a frontend instead of 10")
