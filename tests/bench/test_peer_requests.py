"""Requests and answers of a comparison: one row in every format, answers read back, generators' output understood."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from bench import compare_peers
from bench.peers import generators, models, probe, servers
from bench.peers.generators import LoadFailed
from bench.peers.models import MODELS
from bench.peers.session import Scope
from engines.bundle.repository import Bundle, load_manifest, scan

SPEC = MODELS["mlp_a"]


def test_every_format_carries_the_same_row() -> None:
    row = models.row_of(SPEC).ravel()
    raw = models.payload(SPEC, "raw")
    binary = models.payload(SPEC, "v2bin")
    grpc = service_pb2.ModelInferRequest.FromString(models.payload(SPEC, "grpc").body[5:])
    assert np.array_equal(np.frombuffer(raw.body, np.float32), row)
    assert np.array_equal(np.frombuffer(binary.body[binary.header_bytes :], np.float32), row)
    assert np.array_equal(np.frombuffer(grpc.raw_input_contents[0], np.float32), row)
    assert np.array_equal(np.float32(json.loads(models.payload(SPEC, "json").body)["X"]), row)
    v2json = json.loads(models.payload(SPEC, "v2json").body)["inputs"][0]
    assert np.array_equal(np.float32(v2json["data"]), row)
    assert v2json["shape"] == [1, 64]


@pytest.mark.parametrize("form", ["raw", "json", "v2json"])
def test_a_malformed_row_is_one_element_short(form: str) -> None:
    payload = models.malformed(SPEC, form)
    if form == "raw":
        assert len(payload.body) == 63 * 4
    else:
        body = json.loads(payload.body)
        assert len(body["X"] if form == "json" else body["inputs"][0]["data"]) == 63


def test_answers_are_read_in_every_format() -> None:
    values = np.float32([1.5, -2.0])
    head = b'{"outputs": []}'
    response = service_pb2.ModelInferResponse(raw_output_contents=[values.tobytes()]).SerializeToString()
    assert np.array_equal(models.answer_values("raw", values.tobytes()), values)
    assert np.array_equal(models.answer_values("json", b'{"Y": [1.5, -2.0]}'), values)
    assert np.array_equal(models.answer_values("v2json", b'{"outputs": [{"data": [1.5, -2]}]}'), values)
    assert np.array_equal(models.answer_values("v2bin", head + values.tobytes(), len(head)), values)
    assert np.array_equal(models.answer_values("grpc", models.grpc_frame(response)), values)


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"outputs": []}', b"nonsense"])
def test_an_answer_of_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"v2json|Expecting"):
        models.answer_values("v2json", body)


def test_wrong_values_are_found() -> None:
    probe.compare("x", np.float32([1, 2]), np.float32([1, 2.0001]))
    with pytest.raises(probe.WrongAnswer, match="differ"):
        probe.compare("x", np.float32([1, 2]), np.float32([1, 3]))
    with pytest.raises(probe.WrongAnswer, match="1 values, expected 2"):
        probe.compare("x", np.float32([1]), np.float32([1, 3]))


def test_the_models_are_bundles_that_give_what_they_declare(tmp_path: Path) -> None:
    for name in ("mlp_a", "big"):
        spec = MODELS[name]
        path = models.write(spec, tmp_path / name)
        (bundle,) = scan(tmp_path / name)
        assert isinstance(bundle, Bundle)
        load_manifest(bundle)
        expected = models.expected_of(path, models.row_of(spec))
        assert expected.size == int(np.prod(spec.row_out))
        assert models.write(spec, tmp_path / name) == path


def test_shared_memory_requests_put_the_output_behind_the_input() -> None:
    body = json.loads(models.shared_memory_payload(MODELS["big"], "r").body)
    size = 3 * 2**20
    assert body["inputs"][0]["parameters"] == {"shared_memory_region": "r", "shared_memory_byte_size": size}
    assert body["outputs"][0]["parameters"]["shared_memory_offset"] == size


def test_what_wrk_prints_is_understood() -> None:
    text = (
        'noise\nRESULT {"requests": 100, "seconds": 2.0, "p50_us": 10.0, "p90_us": 20.0, "p99_us": 30.0, '
        '"refused": 3, "broken": 1, "timeouts": 0}\n'
    )
    sample = generators.parse_wrk(text)
    assert sample.per_s == 48.0
    assert (sample.errors, sample.what_errors) == (4, "3 refused, 1 broken")
    assert (sample.p50_ms, sample.p99_ms) == (0.01, 0.03)
    with pytest.raises(LoadFailed):
        generators.parse_wrk("unable to connect")


def test_what_h2load_prints_is_understood() -> None:
    text = "requests: 12 total, 12 started, 11 done, 10 succeeded, 1 failed, 1 errored, 0 timeout\n"
    log = "".join(f"{start}\t200\t{micros}\n" for start, micros in enumerate([100, 200, 300]))
    sample = generators.parse_h2load(text, log, 2)
    assert sample.errors == 1
    assert sample.per_s == pytest.approx(5.5)
    assert sample.p50_ms == 0.2
    with pytest.raises(LoadFailed):
        generators.parse_h2load("", "", 1)


def test_triton_gets_rows_and_window() -> None:
    text = servers.triton_config(MODELS["big"], Path("/m/model.onnx"), 1000)
    assert "dims: [ 3, 512, 512 ]" in text
    assert "max_queue_delay_microseconds: 1000" in text


def test_a_short_scope_measures_json_and_grpc_at_the_top_only() -> None:
    scope = Scope(("ringserve",), ("mlp_a",), (1, 64), (1, 4), passes=1, seconds=1, short=True)
    points = scope.points(servers.PEERS["ringserve"], SPEC)
    assert points == [("v2bin", 1), ("v2bin", 64), ("v2json", 64), ("grpc", 64)]
    assert scope.points(servers.PEERS["litserve"], SPEC) == [("json", 1), ("json", 64)], (
        "its only format is its main one"
    )
    big = scope.points(servers.PEERS["triton-w0"], MODELS["big"])
    assert ("shm", 1) in big
    assert not any(form.endswith("json") for form, _ in big)


def test_the_command_line_names_families_and_keeps_ours() -> None:
    scope = compare_peers.scope_of(compare_peers.parse(["--peers", "triton", "mosec", "--models", "mlp_b"]))
    assert scope.peers == ("ringserve", "triton-w0", "triton-w1ms", "mosec")
    assert scope.models == ("mlp_b",)
    with pytest.raises(SystemExit):
        compare_peers.parse(["--passes", "0"])


def test_only_one_comparison_runs_at_a_time(tmp_path: Path) -> None:
    with (
        compare_peers.alone(tmp_path),
        pytest.raises(SystemExit, match="another comparison"),
        compare_peers.alone(tmp_path),
    ):
        pass
    with compare_peers.alone(tmp_path):
        assert (tmp_path / "lock").read_text().isdigit()
