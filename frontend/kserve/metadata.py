"""What a server tells of itself and its models: metadata, configuration, index (protocols.md 1.7 to 1.10).

Documents are plain dictionaries in KServe's JSON names; the gRPC rendering parses the same ones into messages, so the
two protocols cannot tell different stories.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, Final

from engines.bundle.signature import Signature
from engines.tensor import TensorSpec
from frontend.settings import EndpointSettings
from worker.channel.messages import ModelEntry

EXTENSIONS: Final = (
    "classification",
    "model_repository",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
"""Only what is offered: clients skip calls that are not named here, and rely on those that are."""
SYSTEM_SHARED_MEMORY: Final = "system_shared_memory"

Document = dict[str, Any]


def _own_version() -> str:
    try:
        return metadata.version("ringserve")
    except metadata.PackageNotFoundError:
        return "0+source"


SERVER_VERSION: Final = _own_version()


def server_metadata(settings: EndpointSettings) -> Document:
    """Return ``GET /v2``: name, version and extensions."""
    extensions = list(EXTENSIONS)
    if settings.system_shared_memory.enabled:
        extensions.append(SYSTEM_SHARED_MEMORY)
    return {"name": settings.server_name, "version": SERVER_VERSION, "extensions": extensions}


def model_metadata(entry: ModelEntry, versions: Sequence[str]) -> Document:
    """Return ``GET /v2/models/M`` of a READY version; shapes hold -1 at the batch axis and at variable axes."""
    signature = _signature(entry)
    return {
        "name": entry.name,
        "versions": list(versions) or [entry.version],
        "platform": entry.platform,
        "inputs": [_tensor_metadata(spec) for spec in signature.client_inputs],
        "outputs": [_tensor_metadata(spec) for spec in signature.client_outputs],
    }


def model_config(entry: ModelEntry) -> Document:
    """Return ``GET /v2/models/M/config`` of a READY version.

    KServe's configuration knows a batch axis only in front, and leaves it out of ``dims``. A model with a tensor whose
    batch axis is missing or elsewhere therefore reports ``max_batch_size`` 0 and its whole shapes.
    """
    signature = _signature(entry)
    tensors = signature.client_inputs + signature.client_outputs
    batched = signature.max_rows > 0 and all(spec.batch_axis == 0 for spec in tensors)
    config: Document = {
        "name": entry.name,
        "platform": entry.platform,
        "backend": _backend(entry.platform),
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": signature.max_rows if batched else 0,
        "input": [
            {
                "name": spec.name,
                "data_type": _config_type(spec),
                "format": "FORMAT_NONE",
                "dims": _dims(spec, batched),
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
            }
            for spec in signature.client_inputs
        ],
        "output": [
            {
                "name": spec.name,
                "data_type": _config_type(spec),
                "dims": _dims(spec, batched),
                "label_filename": "",
                "is_shape_tensor": False,
            }
            for spec in signature.client_outputs
        ],
        "instance_group": [
            {"name": entry.name, "kind": "KIND_GPU" if entry.platform == "tensorrt" else "KIND_CPU", "count": 1}
        ],
        "default_model_filename": "",
        "parameters": {},
        "model_transaction_policy": {"decoupled": False},
    }
    if batched and signature.coalesces:
        config["dynamic_batching"] = {
            "preferred_batch_size": [
                size for size in signature.batch_sizes if not entry.max_batch_size or size <= entry.max_batch_size
            ],
            "max_queue_delay_microseconds": 0,
        }
    if entry.task:
        config["parameters"]["task"] = {"string_value": entry.task}
    return config


def repository_index(entries: Iterable[ModelEntry], ready_only: bool) -> list[Document]:
    """Return the index of known model versions; ``ready_only`` leaves out what cannot serve now."""
    return [
        {"name": entry.name, "version": entry.version, "state": entry.state, "reason": entry.reason}
        for entry in entries
        if entry.state == "READY" or not ready_only
    ]


def statistics_document(statistics: list[Document]) -> Document:
    """Return ``GET /v2/models/M/stats`` around what ``Serving.statistics`` gave."""
    return {"model_stats": statistics}


def _signature(entry: ModelEntry) -> Signature:
    assert entry.signature is not None, f"model '{entry.name}' is {entry.state}, only READY models are described"
    return entry.signature


def _tensor_metadata(spec: TensorSpec) -> Document:
    return {"name": spec.name, "datatype": spec.element.wire, "shape": list(spec.shape)}


def _config_type(spec: TensorSpec) -> str:
    wire = spec.element.wire
    return "TYPE_STRING" if wire == "BYTES" else f"TYPE_{wire}"


def _dims(spec: TensorSpec, batched: bool) -> list[int]:
    return list(spec.shape[1:] if batched else spec.shape)


def _backend(platform: str) -> str:
    return platform.partition("_")[0]
