"""Reads a node file: YAML without surprises (no tags, no duplicate keys, no doubled meaning, a size limit)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MAX_NODE_FILE_BYTES = 1024 * 1024


class NodeFileError(Exception):
    """The file cannot be read as one YAML mapping; the text names the file and, where known, line and column."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML itself resolves by silently keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_node_file(path: Path) -> dict[str, Any]:
    """Return the file's mapping; an empty file is an empty mapping.

    Raises:
        NodeFileError: unreadable, too large, not YAML, a duplicate key, or not a mapping with text keys.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NODE_FILE_BYTES + 1)
    except OSError as error:
        raise NodeFileError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_NODE_FILE_BYTES:
        raise NodeFileError(f"{path}: larger than {MAX_NODE_FILE_BYTES} bytes")
    try:
        value = yaml.load(data, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise NodeFileError(f"{path}{where}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise NodeFileError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise NodeFileError(f"{path}: expected a mapping such as 'model_repo: ./models', got {type(value).__name__}")
    return value
