"""A module made from a description of TensorRT's: the same names, and nothing else passes.

``dump_api`` wrote down what the real bindings offer. Here every class of that list becomes a class that refuses an
unknown member, a wrong number of arguments, an unknown keyword, an argument of the wrong type and a write to a property
that cannot be written. What a call does is said by *behaviours* (``library``): plain classes whose members carry the
API's names. A call that the API has but no behaviour does is a ``NotImplementedError``, never an answer.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

API_DIRECTORY = Path(__file__).parent / "api"
VERSIONS = {
    "10.16": "tensorrt-10.16.json",
    "11.4": "tensorrt-11.4.json",
    "rtx-1.7": "tensorrt-rtx-1.7.json",
}
OVERRIDABLE: dict[str, frozenset[str]] = {
    "ILogger": frozenset({"log"}),
    "IErrorRecorder": frozenset(
        {"num_errors", "get_error_code", "get_error_desc", "has_overflowed", "clear", "report_error"}
    ),
    "IOutputAllocator": frozenset({"reallocate_output", "reallocate_output_async", "notify_shape"}),
    "IProgressMonitor": frozenset({"phase_start", "step_complete", "phase_finish"}),
    "IGpuAsyncAllocator": frozenset({"allocate_async", "deallocate_async", "reallocate"}),
}
"""Classes that applications derive from, and what the library calls on them (from the headers' virtual methods)."""
REQUIRED: dict[str, frozenset[str]] = {
    **OVERRIDABLE,
    "IOutputAllocator": frozenset({"reallocate_output_async", "notify_shape"}),
}


_RESULTS: dict[str, Any] = {
    "bool": bool, "int": int, "str": str, "None": type(None), "list[str]": list, "Dims": tuple,
}  # fmt: skip


class EnumMember:
    """A value of one of the library's enums: has ``name`` and ``int()``, and compares with its own kind only."""

    def __init__(self, kind: str, name: str, value: int) -> None:
        self.kind, self.name, self.value = kind, name, value

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EnumMember) and (self.kind, self.value) == (other.kind, other.value)

    def __hash__(self) -> int:
        return hash((self.kind, self.value))

    def __repr__(self) -> str:
        return f"<{self.kind}.{self.name}: {self.value}>"


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: str
    optional: bool


@dataclass(frozen=True)
class Signature:
    """One way to call a method."""

    text: str
    parameters: tuple[Parameter, ...]
    returns: str

    @classmethod
    def parse(cls, text: str) -> Signature:
        """Read ``name(self: T, a: A, b: B = D) -> R``."""
        found = re.fullmatch(r"\w+\((.*)\)(?: -> (.+))?", text)
        assert found is not None, f"cannot read the signature {text!r}"
        parameters = []
        for part in _split(found[1])[1:]:
            name, _, kind = part.partition(":")
            kind, equals, _ = kind.partition(" = ")
            parameters.append(Parameter(name.strip(), kind.strip(), bool(equals)))
        return cls(text, tuple(parameters), (found[2] or "").strip())


def _split(text: str) -> list[str]:
    parts, depth, at = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[at:index].strip())
            at = index + 1
    return [*parts, text[at:].strip()]


class Strict:
    """Base of every class of the module. ``_do`` is the behaviour behind an object."""

    _kind = "Strict"
    _writable: frozenset[str] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_do" or name in self._writable:
            object.__setattr__(self, name, value)
            return
        if type(self).__module__ != __name__ and type(self)._kind in OVERRIDABLE:
            # A class derived by the application keeps what it likes.
            object.__setattr__(self, name, value)
            return
        raise AttributeError(f"'{self._kind}' object has no attribute '{name}' that can be written")


class Library:
    """A strict module.

    Args:
        version: a key of ``VERSIONS``.
        behaviours: per class name, what makes the behaviour of a new object: called with the module and the
            constructor's arguments.
    """

    def __init__(self, version: str, behaviours: Mapping[str, Callable[..., Any]]) -> None:
        self.description: dict[str, Any] = json.loads((API_DIRECTORY / VERSIONS[version]).read_text())
        self.behaviours = behaviours
        self.enums: dict[str, type] = {}
        self.classes: dict[str, type] = {}
        self.module = self._module()

    @property
    def is_rtx(self) -> bool:
        return "rtx" in self.description["module"]

    def enum(self, kind: str, name: str) -> Any:
        return getattr(self.enums[kind], name)

    def wrap(self, kind: str, behaviour: Any) -> Any:
        """Return an object of class ``kind`` that does what ``behaviour`` does."""
        made = object.__new__(self.classes[kind])
        object.__setattr__(made, "_do", behaviour)
        return made

    def _module(self) -> ModuleType:
        module = ModuleType(self.description["module"].replace("_bindings", ""))
        module.__version__ = self.description["version"]  # type: ignore[attr-defined]
        for kind, members in self.description["enums"].items():
            self.enums[kind] = self._enum(kind, members)
            setattr(module, kind, self.enums[kind])
        for kind in self.description["classes"]:
            self.classes[kind] = self._class(kind)
            setattr(module, kind, self.classes[kind])
        for title, members in self.description["nested_enums"].items():
            kind, _, inner = title.partition(".")
            if inner == "Severity":
                severity = self._enum(title, members)
                self.enums.setdefault("Severity", severity)
                setattr(self.classes[kind], inner, severity)
                for name in members:
                    setattr(self.classes[kind], name, getattr(severity, name))
        return module

    def _enum(self, kind: str, members: Mapping[str, int]) -> type:
        values = {name: EnumMember(kind, name, value) for name, value in members.items()}
        return type(kind, (), {**values, "__members__": values})

    def _class(self, kind: str) -> type:
        described = self.description["classes"][kind]
        space: dict[str, Any] = {"_kind": kind, "__module__": __name__}
        space["_writable"] = frozenset(name for name, mode in described["properties"].items() if mode == "rw")
        for name, mode in described["properties"].items():
            space[name] = self._property(kind, name, mode == "rw")
        for name, texts in described["methods"].items():
            if not name.startswith("__") and kind not in ("ILogger", "IErrorRecorder", "IProgressMonitor"):
                space[name] = self._method(kind, name, tuple(Signature.parse(text) for text in texts))
        space["__init__"] = self._constructor(kind, described["methods"].get("__init__", []))
        if kind == "IHostMemory":
            space["__bytes__"] = lambda made: bytes(made._do.data)
        return type(kind, (Strict,), space)

    def _constructor(self, kind: str, texts: list[str]) -> Callable[..., None]:
        signatures = tuple(Signature.parse(text) for text in texts)

        def construct(made: Any, *args: Any, **kwargs: Any) -> None:
            if not signatures:
                raise TypeError(f"{kind}: No constructor defined!")
            values = self.checked(f"{kind}.__init__", signatures, args, kwargs)[1]
            if kind in OVERRIDABLE:
                self._require_overrides(kind, type(made))
                object.__setattr__(made, "_do", None)
                return
            if kind not in self.behaviours:
                raise NotImplementedError(f"the fake does not make a {kind}")
            object.__setattr__(made, "_do", self.behaviours[kind](self, *values))

        return construct

    def _require_overrides(self, kind: str, derived: type) -> None:
        """The real library ignores a misspelt override; here it is refused."""
        own = {
            name
            for base in derived.__mro__
            if base not in self.classes.values() and base not in (Strict, object)
            for name, member in vars(base).items()
            if callable(member) and not name.startswith("_")
        }
        missing = REQUIRED[kind] - own
        if missing:
            raise TypeError(f"{derived.__name__} derives from {kind} without {', '.join(sorted(missing))}")

    def _property(self, kind: str, name: str, writable: bool) -> property:
        def get(made: Any) -> Any:
            if not hasattr(made._do, name):
                raise NotImplementedError(f"the fake has no {kind}.{name}")
            return getattr(made._do, name)

        def put(made: Any, value: Any) -> None:
            if not hasattr(made._do, name):
                raise NotImplementedError(f"the fake has no {kind}.{name}")
            setattr(made._do, name, value)

        return property(get, put if writable else None)

    def _method(self, kind: str, name: str, signatures: tuple[Signature, ...]) -> Callable[..., Any]:
        title = f"{kind}.{name}"

        def call(made: Any, *args: Any, **kwargs: Any) -> Any:
            signature, values = self.checked(title, signatures, args, kwargs)
            behaviour = getattr(made._do, name, None)
            if behaviour is None:
                raise NotImplementedError(f"the fake does not do {title}")
            result = behaviour(*values)
            self._check_result(title, signature, result)
            return result

        call.__name__ = name
        return call

    def checked(
        self, title: str, signatures: tuple[Signature, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Signature, list[Any]]:
        """Return the signature that takes these arguments, and them in order; those left out are left out."""
        refusals = []
        for signature in signatures:
            values = self._bound(signature, args, kwargs)
            if isinstance(values, list):
                return signature, values
            refusals.append(f"  {signature.text}: {values}")
        raise TypeError(f"{title}(): incompatible function arguments\n" + "\n".join(refusals))

    def _bound(self, signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | str:
        if len(args) > len(signature.parameters):
            return f"{len(args)} arguments for {len(signature.parameters)}"
        names = [parameter.name for parameter in signature.parameters]
        unknown = [name for name in kwargs if name not in names[len(args) :]]
        if unknown:
            return f"unexpected keywords {unknown}"
        values = []
        for index, parameter in enumerate(signature.parameters):
            if index < len(args):
                value = args[index]
            elif parameter.name in kwargs:
                value = kwargs[parameter.name]
            elif parameter.optional:
                continue
            else:
                return f"'{parameter.name}' is missing"
            if not self._fits(value, parameter):
                return f"'{parameter.name}' is a {type(value).__name__}, expected {parameter.kind}"
            values.append(value)
        return values

    def _fits(self, value: Any, parameter: Parameter) -> bool:
        kind = parameter.kind.rpartition("::")[2]
        if kind in self.enums:
            return isinstance(value, EnumMember) and value.kind == kind
        if kind in self.classes and kind != "Dims":
            return isinstance(value, self.classes[kind]) or (value is None and not kind.startswith("IL"))
        match kind:
            case "typing.SupportsInt":
                return not isinstance(value, (EnumMember, float)) and _is_integer(value)
            case "str":
                return isinstance(value, str) or (value is None and parameter.optional)
            case "bool":
                return isinstance(value, bool)
            case "tuple" | "list":
                return isinstance(value, tuple if kind == "tuple" else list) and all(map(_is_integer, value))
            case "Dims":
                return isinstance(value, (tuple, list)) and all(map(_is_integer, value))
            case "typing_extensions.Buffer":
                return isinstance(value, (bytes, bytearray, memoryview, self.classes["IHostMemory"]))
        raise NotImplementedError(f"the fake does not know arguments of type {parameter.kind}")

    def _check_result(self, title: str, signature: Signature, result: Any) -> None:
        """A behaviour that answers in another type than the API would hide mistakes."""
        kind = signature.returns.rpartition("::")[2]
        expected: Any = {
            "bool": bool,
            "int": int,
            "str": str,
            "None": type(None),
            "list[str]": list,
            "Dims": tuple,
        }.get(kind)
        if kind in self.enums:
            assert isinstance(result, EnumMember) and result.kind == kind, f"{title} must answer {kind}, not {result!r}"
        elif kind in self.classes and kind != "Dims":
            wanted = self.classes["ParserError"] if kind == "IParserError" else self.classes[kind]
            assert result is None or isinstance(result, wanted), f"{title} must answer {kind}, not {result!r}"
        elif expected is not None:
            assert isinstance(result, expected), f"{title} must answer {kind}, not {result!r}"


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
