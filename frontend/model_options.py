"""Per-model scheduling settings: ``global.scheduler.models`` of the node file, and a variable that holds the same."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from frontend import options
from frontend.options import ENVIRONMENT_PREFIX, BadValue
from worker.config import ModelSettings

PATH: Final = "global.scheduler.models"
MODELS_VARIABLE: Final = f"{ENVIRONMENT_PREFIX}SCHEDULER_MODELS"
"""Such as ``{"resnet50": {"weight": 2}}``; what it names wins over the file, key by key."""
_FIELDS: Final = {field.name: field for field in msgspec.structs.fields(ModelSettings)}
NOT_AVAILABLE: Final = ("residency",)
"""Keys of the format that this version cannot honour; accepting them would be a lie."""


@dataclass(slots=True)
class ModelOptions:
    """What the sources say together.

    Attributes:
        sources: source by path, such as ``global.scheduler.models.resnet50.weight``.
    """

    settings: dict[str, ModelSettings] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)


def read_models(document: Mapping[str, Any], environ: Mapping[str, str], file_name: str) -> ModelOptions:
    """Return every model's settings from the node file and the environment, and everything wrong with them."""
    found = ModelOptions()
    values: dict[str, dict[str, Any]] = {}
    tree = document.get("global")
    scheduler = tree.get("scheduler") if isinstance(tree, dict) else None
    _take(found, values, scheduler.get("models") if isinstance(scheduler, dict) else None, f"file {file_name}")
    text = environ.get(MODELS_VARIABLE)
    if text is not None:
        source = f"environment {MODELS_VARIABLE}"
        try:
            _take(found, values, msgspec.json.decode(text), source)
        except (msgspec.DecodeError, RecursionError) as error:
            wanted = 'expected JSON such as {"resnet50": {"weight": 2}}'
            found.mistakes.append(f"{PATH}: {wanted}, got {reprlib.repr(text)}: {error} (from {source})")
    found.settings = {name: ModelSettings(**given) for name, given in values.items()}
    return found


def _take(found: ModelOptions, values: dict[str, dict[str, Any]], models: Any, source: str) -> None:
    note = "" if source.startswith("file") else f" (from {source})"
    for name, given in _mapping(found, PATH, models, note).items():
        path = f"{PATH}.{name}"
        keys = _mapping(found, path, given, note)
        found.mistakes += [f"{path}.{key}: not available yet{note}" for key in keys if key in NOT_AVAILABLE]
        given_keys = [key for key in keys if key not in NOT_AVAILABLE]
        found.mistakes += [mistake + note for mistake in options.unknown_keys(path, given_keys, list(_FIELDS))]
        mine = values.setdefault(name, {})
        for key, value in keys.items():
            if key in _FIELDS:
                try:
                    mine[key] = options.convert(f"{path}.{key}", _FIELDS[key].type, value, text=False)
                    found.sources[f"{path}.{key}"] = source
                except BadValue as error:
                    found.mistakes.append(f"{path}.{key}: {error}{note}")


def _mapping(found: ModelOptions, path: str, value: Any, note: str) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return value
    found.mistakes.append(f"{path}: expected a mapping, got {reprlib.repr(value)}{note}")
    return {}
