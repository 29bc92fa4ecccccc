"""Reading a model file for the array engines, with the model's name in every refusal."""

from __future__ import annotations

from pathlib import Path

from engines.array.graph import Graph, UnusableGraph, read_graph
from engines.array.interpreter import OPERATORS
from engines.errors import NotReady


def load_graph(name: str, model_file: Path) -> Graph:
    """Return the file's graph.

    Raises:
        NotReady: it cannot be read, or contains what the array engine cannot run.
    """
    try:
        return read_graph(model_file, OPERATORS)
    except UnusableGraph as error:
        raise NotReady(f"{name}: {model_file} does not load: {error}") from error
    except Exception as error:
        # The protobuf library raises types of its own for a file that is cut short.
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise NotReady(f"{name}: {model_file} does not load: {reason}") from error
