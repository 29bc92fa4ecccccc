"""``ringserve config``, and how ``serve`` reads its settings."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from frontend.cli import EXIT_USAGE, FLAGS, SWITCHES
from frontend.config import ConfigError, Flag, Loaded, load
from frontend.node.cpus import auto_frontends_here

_PASSWORD = re.compile(r"(://[^:/@]*:)[^@]*@")
_PATH = re.compile(r"(://[^/]*/).+")
"""Of a webhook: many receivers trust whoever knows it."""


def load_settings(
    arguments: argparse.Namespace, *, need_models: bool, need_upstream_keys: bool = True
) -> Loaded | None:
    """Return what command line, environment and node file give; None after telling every mistake."""
    given = vars(arguments)
    known = {flag: path for flag, (path, *_) in [*FLAGS.items(), *SWITCHES.items()]}
    flags = {path: Flag(flag, given[path]) for flag, path in known.items() if given[path] is not None}
    node_file = Path(arguments.node) if arguments.node else None
    try:
        return load(
            node_file, os.environ, flags, auto_frontends_here,
            need_models=need_models, need_upstream_keys=need_upstream_keys,
        )  # fmt: skip
    except ConfigError as error:
        for mistake in error.mistakes:
            print(f"ringserve: {mistake}", file=sys.stderr)
        return None


def show(arguments: argparse.Namespace) -> int:
    """Print every effective value and its source; exit status 2 after mistakes."""
    loaded = load_settings(arguments, need_models=False)
    if loaded is None:
        return EXIT_USAGE
    values = effective(loaded)
    if arguments.json:
        rows = {path: {"value": value, "source": source} for path, (value, source) in values.items()}
        print(json.dumps(rows, indent=2))
        return 0
    width = max(len(path) for path in values)
    for path, (value, source) in values.items():
        print(f"{path.ljust(width)}  {json.dumps(value)}  ({source})")
    return 0


def effective(loaded: Loaded) -> dict[str, tuple[Any, str]]:
    """Return value and source of every setting by path."""
    tree = msgspec.to_builtins(loaded.settings)
    tree["models"] = tree.pop("pins")
    found: dict[str, tuple[Any, str]] = {}
    for path, source in loaded.sources.items():
        value: Any = tree
        parts = path.removeprefix("global.").split(".")
        # Model names may hold dots: they stand between a fixed number of known parts.
        if path.startswith("models."):
            parts = ["models", path.removeprefix("models.")]
        elif path.startswith("global.scheduler.models."):
            *name, key = path.removeprefix("global.scheduler.models.").split(".")
            parts = ["scheduler", "models", ".".join(name), key]
        for part in parts:
            value = value[part]
        if path == "gateway.store":
            value = _PASSWORD.sub(r"\1***@", value)
        if path == "gateway.alerts.webhook.url":
            value = _PATH.sub(r"\1***", value)
        found[path] = (value, source)
    return found
