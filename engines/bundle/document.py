"""YAML text to plain values, strictly: what a manifest may not contain is refused, not interpreted.

Differences from a plain safe loader, each because a manifest is written by hand and read by several tools:
duplicate keys are mistakes (the last one would win silently); only ``true``/``false`` are booleans, so that the axis
letters ``no`` and ``on`` stay letters; no sexagesimal numbers, dates, tags or merge keys. Anchors and aliases are read,
since tools that write YAML make them for equal parts.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any, ClassVar, Final

import yaml

from engines.bundle.manifest import MAX_MANIFEST_BYTES, Problem

MAX_SHOWN_CHARS: Final = 80
"""Longest piece of a file that a message repeats."""

_SHORT: Final = reprlib.Repr()
_SHORT.maxlist = 20
_SHORT.maxlevel = 3
_SHORT.maxstring = MAX_SHOWN_CHARS


def read_document(raw: bytes, file: str) -> tuple[Any, list[Problem]]:
    """Return the file's single YAML value and the mistakes found on the way; the value is None if it has none."""
    if len(raw) > MAX_MANIFEST_BYTES:
        found = f"{len(raw)} bytes"
        return None, [Problem(file, "", f"at most {MAX_MANIFEST_BYTES} bytes", found, "keep data out of the manifest")]
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return None, [Problem(file, "", "UTF-8 text", f"byte {error.start} is not UTF-8", "save the file as UTF-8")]
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        return None, [Problem(file, "", "YAML text", _where(error), "remove the unprintable character")]
    try:
        value = loader.get_single_data()
    except yaml.YAMLError as error:
        return None, [Problem(file, "", "well-formed YAML", _where(error), "correct the syntax at that place")]
    except RecursionError:
        return None, [Problem(file, "", "a few levels of nesting", "very deep nesting", "remove the nested brackets")]
    except ValueError:
        # The interpreter refuses to convert a number of thousands of digits; it is the only text that gets this far.
        return None, [Problem(file, "", "numbers of a few digits", "a number too long to read", "correct the number")]
    finally:
        loader.dispose()
    problems = [
        Problem(file, "", "every key once", f"key {shown(key)} twice, again in line {line}", "remove one of them")
        for key, line in loader.repeated
    ]
    return value, problems


def shown(value: Any) -> str:
    """Return a value as a message shows it: quoted if text, shortened, printable."""
    if isinstance(value, dict):
        return f"a mapping with {len(value)} {'key' if len(value) == 1 else 'keys'}"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    # Not repr alone: aliases can make a short file a list of astronomical length.
    text = _SHORT.repr(value) if isinstance(value, list) else repr(value) if isinstance(value, str) else str(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


class _Loader(yaml.SafeLoader):
    """A safe loader that records repeated keys, and refuses tags."""

    # The stubs declare it per instance; the loader reads and extends it per class.
    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[tuple[Any, int]] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs leave it bare
        if getattr(event, "tag", None) is not None:
            # Tagged text reaches constructors that fail in ways of their own, and no manifest value needs a tag.
            what = "a tag (!name), which manifests do not use"
            raise yaml.composer.ComposerError(None, None, what, event.start_mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: Any) -> None:
        """Leave merge keys alone: ``<<`` is then an unknown key like any other."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        # Always deep: a shallow list or mapping is filled later, and a key must be complete to be compared.
        mapping: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (list, dict)):
                raise yaml.constructor.ConstructorError(None, None, "a list or mapping as a key", key_node.start_mark)
            if key in mapping:
                self.repeated.append((key, key_node.start_mark.line + 1))
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), [*"-+0123456789"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    [*"-+0123456789."],
)


def _where(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        text = error.problem or error.context or "a syntax error"
        return f"{text} in line {mark.line + 1}, column {mark.column + 1}" if mark else text
    return " ".join(str(error).split())
