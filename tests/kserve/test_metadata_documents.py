"""Metadata and configuration, as both protocols tell them."""

from __future__ import annotations

import json

import pytest
from google.protobuf import json_format
from serving_double import DoubleServing, entry, spec
from tritonclient.grpc import model_config_pb2

from engines.tensor import DTYPES
from frontend.kserve import metadata
from frontend.settings import EndpointSettings

DOUBLE = DoubleServing()


def test_only_what_is_offered_is_advertised_under_the_configured_name() -> None:
    document = metadata.server_metadata(EndpointSettings(server_name="triton"))
    assert document["name"] == "triton"
    assert document["version"]
    assert {"binary_tensor_data", "statistics", "model_configuration"} <= set(document["extensions"])
    assert not {"system_shared_memory", "cuda_shared_memory", "trace", "logging", "sequence"} & set(
        document["extensions"]
    )


@pytest.mark.parametrize("name", sorted(DOUBLE.models))
def test_configurations_are_what_clients_parse(name: str) -> None:
    document = metadata.model_config(DOUBLE.models[name])
    config = json_format.ParseDict(json.loads(json.dumps(document)), model_config_pb2.ModelConfig())  # type: ignore[attr-defined]
    described = metadata.model_metadata(DOUBLE.models[name], ["1"])
    assert config.name == name
    for told, shown in zip(config.input, described["inputs"], strict=True):
        batch = [-1] if config.max_batch_size else []
        assert batch + list(told.dims) == shown["shape"]
        assert config.model_transaction_policy.decoupled is False


def test_every_datatype_has_its_configuration_name() -> None:
    for dtype in DTYPES:
        told = metadata.model_config(DOUBLE.models[f"echo_{dtype.name}"])["input"][0]["data_type"]
        assert told == ("TYPE_STRING" if dtype.wire == "BYTES" else f"TYPE_{dtype.wire}")
        assert told in model_config_pb2.DataType.keys()  # type: ignore[attr-defined]  # noqa: SIM118


def test_batching_is_told_as_sizes() -> None:
    capped = entry("m", (spec("x", "f32", -1, 4),), (spec("y", "f32", -1),), (1, 8, 32))
    config = metadata.model_config(capped)
    assert config["max_batch_size"] == 32
    assert config["dynamic_batching"]["preferred_batch_size"] == [1, 8, 32]


@pytest.mark.parametrize(
    ("tensor", "sizes"), [(spec("x", "f32", 3, -1, batch_axis=1), (1, 8)), (spec("x", "f32", 3, batch_axis=None), (0,))]
)
def test_a_batch_axis_that_is_not_in_front_is_no_batching_to_kserve(tensor: object, sizes: tuple[int, ...]) -> None:
    config = metadata.model_config(entry("m", (tensor,), (tensor,), sizes))  # type: ignore[arg-type]
    assert config["max_batch_size"] == 0
    assert "dynamic_batching" not in config
    assert config["input"][0]["dims"] == list(tensor.shape)  # type: ignore[attr-defined]


def test_the_index_lists_all_or_the_ready() -> None:
    everything = metadata.repository_index(DOUBLE.entries(), ready_only=False)
    assert {"name": "loading", "version": "1", "state": "LOADING", "reason": "reading weights"} in everything
    ready = metadata.repository_index(DOUBLE.entries(), ready_only=True)
    assert {item["state"] for item in ready} == {"READY"}
    assert len(ready) == len(everything) - 1
