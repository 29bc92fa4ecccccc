"""Print as JSON what a TensorRT Python module offers: names, signatures, which properties can be written, enum values.

Run by ``scripts/tensorrt_api`` in a process whose path has the bindings. No documentation text is kept: only what code
can call. Signatures are those that pybind11 puts into the first lines of a docstring.

    python tests/tensorrt_fake/dump_api.py MODULE > api.json
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

CLASSES = (
    "Builder", "ExecutionContextAllocationStrategy", "EngineStat", "IBuilderConfig", "ICudaEngine", "IErrorRecorder",
    "IExecutionContext", "IHostMemory", "ILayer", "ILogger", "INetworkDefinition", "IOptimizationProfile",
    "IOutputAllocator", "IProgressMonitor", "IRuntimeConfig", "ITensor", "ITimingCache", "Logger", "OnnxParser",
    "ParserError", "Runtime", "Dims", "BuilderFlag", "DataType", "ErrorCode", "ErrorCodeTRT",
    "HardwareCompatibilityLevel",
    "LayerInformationFormat", "MemoryPoolType", "NetworkDefinitionCreationFlag", "OnnxParserFlag", "OptProfileSelector",
    "PreviewFeature", "TacticSource", "TensorIOMode", "TensorLocation", "ProfilingVerbosity", "ComputeCapability",
    "TensorFormat", "IGpuAsyncAllocator", "IGpuAllocator", "IRefitter", "Refitter", "CudaGraphStrategy",
    "EngineValidity",
)  # fmt: skip
"""What the engine uses, and its neighbours, so that a wrong turn next door is caught by name."""

_SPECIAL = ("__init__", "__len__", "__getitem__", "__buffer__", "__enter__", "__exit__")
_SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\(.*\)(?: -> .+)?$")


def dump(module: Any) -> dict[str, Any]:
    """Return the description of ``module``."""
    classes = {name: getattr(module, name) for name in CLASSES if hasattr(module, name)}
    return {
        "module": module.__name__,
        "version": module.__version__,
        "names": sorted(name for name in dir(module) if not name.startswith("_")),
        "enums": {name: _enum(cls) for name, cls in classes.items() if hasattr(cls, "__members__")},
        "classes": {name: _class(cls) for name, cls in classes.items() if not hasattr(cls, "__members__")},
        "nested_enums": {
            f"{name}.{inner}": _enum(getattr(cls, inner))
            for name, cls in classes.items()
            for inner in dir(cls)
            if not inner.startswith("_")
            and hasattr(getattr(cls, inner), "__members__")
            and not hasattr(cls, "__members__")
        },
    }


def _enum(cls: Any) -> dict[str, int]:
    return {name: int(value) for name, value in cls.__members__.items()}


def _class(cls: Any) -> dict[str, Any]:
    methods: dict[str, list[str]] = {}
    properties: dict[str, str] = {}
    for name in dir(cls):
        if name.startswith("_") and name not in (
            "__init__",
            "__len__",
            "__getitem__",
            "__buffer__",
            "__enter__",
            "__exit__",
        ):
            continue
        member = _raw(cls, name)
        if isinstance(member, property):
            properties[name] = "rw" if member.fset is not None else "ro"
        elif callable(getattr(cls, name)) and not isinstance(getattr(cls, name), type):
            methods[name] = _signatures(getattr(cls, name).__doc__ or "")
    bases = [base.__name__ for base in cls.__mro__[1:] if base.__name__ not in ("object", "pybind11_object")]
    return {"bases": bases, "methods": methods, "properties": properties}


def _raw(cls: Any, name: str) -> Any:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


def _signatures(doc: str) -> list[str]:
    found = []
    for line in doc.splitlines():
        line = line.strip()
        if _SIGNATURE.match(line) and "self" in line:
            line = re.sub(r"^\d+\. ", "", line)
            line = re.sub(r"<[\w.]+\.(\w+): -?\d+>", r"\1", line)
            line = re.sub(r"tensorrt_(?:rtx_)?bindings\.tensorrt(?:_rtx)?\.", "", line)
            found.append(re.sub(r"<[^<>]* object at 0x[0-9a-f]+>", "...", line))
    return found


if __name__ == "__main__":
    json.dump(dump(importlib.import_module(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
