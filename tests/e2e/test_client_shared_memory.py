"""Client shared memory with a real node of two frontends and the clients' own calls, on both protocols."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

import onnx_models
from node_models import TEXT_MANIFEST, TEXT_MODEL_PY, rows_manifest
from real_node import Node, shared_memory_unchanged, until

pytestmark = pytest.mark.process

NODE_FILE = "global: {endpoints: {system_shared_memory: {enabled: true, key_prefix: rst_, max_regions: 16}}}\n"
HTTP, GRPC = "http", "grpc"
BOTH = pytest.mark.parametrize("protocol", [HTTP, GRPC])


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    root = tmp_path_factory.mktemp("shared")
    affine = onnx_models.affine(root / "models" / "affine", columns=4)
    (affine.parent / "manifest.yaml").write_text(rows_manifest())
    # One by one, so that twenty requests take a while.
    slow = onnx_models.slow(root / "models" / "slow", 100.0)
    (slow.parent / "manifest.yaml").write_text(rows_manifest(sizes="[1]"))
    text = onnx_models.identity(root / "models" / "text")
    (text.parent / "manifest.yaml").write_text(TEXT_MANIFEST)
    (text.parent / "model.py").write_text(TEXT_MODEL_PY)
    onnx_models.identity(root / "models" / "echo_bool", "bool")
    onnx_models.simple(root / "models" / "simple")
    (root / "node.yaml").write_text(NODE_FILE)
    with shared_memory_unchanged(), Node(root / "models", root / "run", node_file=root / "node.yaml") as node:
        yield node


def module_of(protocol: str) -> ModuleType:
    return httpclient if protocol == HTTP else grpcclient


@pytest.fixture(scope="module")
def ports(node: Node) -> dict[str, int]:
    return node.ports


@pytest.fixture
def clients(ports: dict[str, int]) -> Iterator[Any]:
    """Return a function that opens one more connection, which may reach either frontend."""
    with contextlib.ExitStack() as stack:

        def connect(protocol: str) -> Any:
            address = f"127.0.0.1:{ports[f'{protocol}_port']}"
            options: dict[str, Any] = {}
            if protocol == GRPC:
                # Clients of one address would share a connection otherwise.
                options = {"channel_args": [("test.serial", secrets.token_hex(4))]}
            return stack.enter_context(module_of(protocol).InferenceServerClient(address, **options))

        yield connect
        connect(HTTP).unregister_system_shared_memory()


@contextlib.contextmanager
def region(size_bytes: int) -> Iterator[tuple[Any, str]]:
    """Make an object as clients do; gives its handle and key."""
    key = f"/rst_{secrets.token_hex(6)}"
    handle = shm.create_shared_memory_region("region", key, size_bytes, create_only=True)
    try:
        yield handle, key
    finally:
        with contextlib.suppress(FileNotFoundError):
            shm.destroy_shared_memory_region(handle)


def tensors(protocol: str, name: str, array: np.ndarray, output: str) -> tuple[list[Any], list[Any]]:
    """Return an input at the beginning of region ``in`` and an output at byte 64 of region ``out``."""
    module = module_of(protocol)
    given = module.InferInput(name, list(array.shape), "FP32")
    given.set_shared_memory("in", array.nbytes)
    wanted = module.InferRequestedOutput(output)
    wanted.set_shared_memory("out", array.nbytes, offset=64)
    return [given], [wanted]


@BOTH
def test_tensors_move_through_regions_whichever_frontend_is_reached(clients: Any, protocol: str) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    first = clients(protocol)
    with region(4096) as (taken, taken_key), region(4096) as (given, given_key):
        first.register_system_shared_memory("in", taken_key, 4096)
        first.register_system_shared_memory("out", given_key, 4096)
        inputs, outputs = tensors(protocol, "INPUT", array, "OUTPUT")
        for turn in range(8):
            shm.set_shared_memory_region(taken, [array + turn])
            result = clients(protocol).infer("affine", inputs, outputs=outputs)
            told = result.get_response(as_json=True) if protocol == GRPC else result.get_response()
            assert [output["name"] for output in told["outputs"]] == ["OUTPUT"]
            assert not told["outputs"][0].keys() & {"data", "parameters"}
            found = shm.get_contents_as_numpy(given, np.float32, [3, 4], offset=64)
            np.testing.assert_array_equal(found, (array + turn) * 2 + 1)
        first.unregister_system_shared_memory("in")
        first.unregister_system_shared_memory("in")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'in'"):
            clients(protocol).infer("affine", inputs, outputs=outputs)


@BOTH
def test_some_tensors_in_regions_and_some_in_the_message(clients: Any, protocol: str) -> None:
    module, client = module_of(protocol), clients(protocol)
    one, two = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 3, np.int32)
    with region(256) as (handle, key):
        client.register_system_shared_memory("part", key, 128, offset=64)
        shm.set_shared_memory_region(handle, [two], offset=64)
        inputs = [module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        inputs[0].set_data_from_numpy(one)
        inputs[1].set_shared_memory("part", 64)
        outputs = [module.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
        outputs[0].set_shared_memory("part", 64, offset=64)
        result = client.infer("simple", inputs, outputs=outputs)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), one - two)
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.int32, [1, 16], offset=128), one + two)


@BOTH
def test_text_through_hooks_and_requests_larger_than_a_batch(clients: Any, protocol: str) -> None:
    module, client = module_of(protocol), clients(protocol)
    rows = np.random.default_rng(1).standard_normal((70, 4)).astype(np.float32)
    with region(8192) as (handle, key):
        client.register_system_shared_memory("in", key, 4096)
        client.register_system_shared_memory("out", key, 4096, offset=4096)
        wire = np.frombuffer(b"\2\0\0\0ab\1\0\0\0c", np.uint8)
        shm.set_shared_memory_region(handle, [wire])
        text = module.InferInput("TEXT", [2], "BYTES")
        text.set_shared_memory("in", len(wire))
        upper = module.InferRequestedOutput("UPPER")
        upper.set_shared_memory("out", 64)
        result = client.infer("text", [text], outputs=[upper])
        assert result.get_output("UPPER") is not None
        assert shm.get_contents_as_numpy(handle, np.object_, [2], offset=4096).tolist() == [b"AB", b"C"]

        shm.set_shared_memory_region(handle, [rows])
        inputs, outputs = tensors(protocol, "INPUT", rows, "OUTPUT")
        result = client.infer("affine", inputs, outputs=outputs, parameters={"ringserve_explain": True})
        found = shm.get_contents_as_numpy(handle, np.float32, [70, 4], offset=4096 + 64)
        np.testing.assert_array_equal(found, rows * 2 + 1)


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("unknown region", {"region": "nobody"}, "Unable to find shared memory region: 'nobody'"),
    ("beyond the region", {"offset": 4096 - 32}, r"Invalid offset \+ byte size for shared memory region: 'in'"),
    ("wrong size", {"size_bytes": 44}, "input byte size mismatch for input 'INPUT'.*Expected 48, got 44"),
    ("output too small", {"out_bytes": 40}, r"output 'OUTPUT' \(40 bytes\) should be at least 48 bytes"),
    ("output beyond", {"out_offset": 4090}, r"Invalid offset \+ byte size for shared memory region: 'out'"),
]


@BOTH
@pytest.mark.parametrize(("change", "text"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistakes_name_the_region_and_never_the_key(
    clients: Any, protocol: str, change: dict[str, Any], text: str
) -> None:
    module, client = module_of(protocol), clients(protocol)
    values = {"region": "in", "offset": 0, "size_bytes": 48, "out_bytes": 48, "out_offset": 0} | change
    with region(8192) as (_, key):
        client.register_system_shared_memory("in", key, 4096)
        client.register_system_shared_memory("out", key, 4096, offset=4096)
        given = module.InferInput("INPUT", [3, 4], "FP32")
        given.set_shared_memory(values["region"], values["size_bytes"], offset=values["offset"])
        wanted = module.InferRequestedOutput("OUTPUT")
        wanted.set_shared_memory("out", values["out_bytes"], offset=values["out_offset"])
        with pytest.raises(InferenceServerException, match=text) as caught:
            client.infer("affine", [given], outputs=[wanted])
        assert key.strip("/") not in str(caught.value)
        with pytest.raises(InferenceServerException, match="'in' already in manager") as caught:
            client.register_system_shared_memory("in", key, 8)
        assert key.strip("/") not in str(caught.value)


@BOTH
def test_a_bool_that_is_none_is_found_where_it_was_copied_to(clients: Any, protocol: str) -> None:
    module, client = module_of(protocol), clients(protocol)
    with region(64) as (handle, key):
        client.register_system_shared_memory("in", key, 64)
        given = module.InferInput("INPUT", [1, 4], "BOOL")
        given.set_shared_memory("in", 4)
        shm.set_shared_memory_region(handle, [np.array([0, 1, 2, 1], np.uint8)])
        with pytest.raises(InferenceServerException, match="a byte of datatype 'BOOL' must be 0 or 1, got 2"):
            client.infer("echo_bool", [given])
        shm.set_shared_memory_region(handle, [np.array([0, 1, 0, 1], np.uint8)])
        assert client.infer("echo_bool", [given]).as_numpy("OUTPUT").tolist() == [[False, True, False, True]]


SHRUNK = "shared memory region 'out' was made smaller after it was registered"


def outcome(error: BaseException | None) -> str:
    """Return an answer's error text without its status; empty for none."""
    return "" if error is None else re.sub(r"^\[.*?\] ", "", str(error))


@BOTH
@pytest.mark.parametrize("harm", ["unregister", "unlink", "truncate outputs", "truncate inputs"])
def test_sm_01_taking_memory_away_fails_at_most_its_requests(
    node: Node, ports: dict[str, int], clients: Any, protocol: str, harm: str
) -> None:
    pids = sorted(node.pids("frontend") + node.pids("worker"))
    client = clients(protocol)
    array = np.arange(4, dtype=np.float32).reshape(1, 4)
    with region(4096) as (taken, taken_key), region(4096) as (given, given_key), ThreadPoolExecutor(20) as pool:
        client.register_system_shared_memory("in", taken_key, 4096)
        client.register_system_shared_memory("out", given_key, 4096)
        shm.set_shared_memory_region(taken, [array])
        inputs, outputs = tensors(protocol, "INPUT", array, "OUTPUT")
        calls = [pool.submit(clients(protocol).infer, "slow", inputs, outputs=outputs) for _ in range(20)]
        until("requests under way", lambda: in_flight(ports) >= 8 or None)
        client.unregister_system_shared_memory("in")
        client.unregister_system_shared_memory()
        if harm == "unlink":
            for key in (taken_key, given_key):
                os.unlink(f"/dev/shm{key}")
        if harm.startswith("truncate"):
            os.truncate(f"/dev/shm{given_key if harm == 'truncate outputs' else taken_key}", 0)
        answers = Counter(outcome(call.exception(60)) for call in calls)
        # Those that were under way: inputs are read when a request comes, and what was unlinked is still held.
        expected = SHRUNK if harm == "truncate outputs" else ""
        assert answers[expected] > 0
        # Some may have ended before, or come after.
        assert answers.keys() <= {"", expected, "Unable to find shared memory region: 'in'"}
        for key in (taken_key, given_key):
            if harm.startswith("truncate"):
                os.truncate(f"/dev/shm{key}", 4096)
        if not expected:
            found = shm.get_contents_as_numpy(given, np.float32, [1, 4], offset=64)
            np.testing.assert_array_equal(found, array)
        if harm == "unlink":
            # The client's own helper wants to unlink what it made.
            for key in (taken_key, given_key):
                Path(f"/dev/shm{key}").touch()
    assert sorted(node.pids("frontend") + node.pids("worker")) == pids
    assert clients(protocol).is_server_live()


def test_perf_analyzer_order_of_calls(clients: Any) -> None:
    """As the load generator does it with ``--shared-memory system``, both protocols, twice over the same names."""
    rows = np.ones((1, 4), np.float32)
    for protocol in (HTTP, GRPC, HTTP):
        client, module = clients(protocol), module_of(protocol)
        with region(1024) as (taken, taken_key), region(1024) as (given, given_key):
            assert client.get_model_metadata("affine") is not None
            assert client.get_model_config("affine") is not None
            client.unregister_system_shared_memory()
            client.unregister_cuda_shared_memory()
            client.register_system_shared_memory("OUTPUT", given_key, 1024)
            client.register_system_shared_memory("INPUT_0_0", taken_key, 1024)
            metadata = client.get_server_metadata(as_json=True) if protocol == GRPC else client.get_server_metadata()
            assert "system_shared_memory" in metadata["extensions"]
            assert "cuda_shared_memory" not in metadata["extensions"]
            client.get_inference_statistics("affine")
            shm.set_shared_memory_region(taken, [rows])
            sent = module.InferInput("INPUT", [1, 4], "FP32")
            sent.set_shared_memory("INPUT_0_0", 16)
            wanted = module.InferRequestedOutput("OUTPUT")
            wanted.set_shared_memory("OUTPUT", 16)
            for _ in range(3):
                client.infer("affine", [sent], outputs=[wanted])
            np.testing.assert_array_equal(shm.get_contents_as_numpy(given, np.float32, [1, 4]), rows * 2 + 1)
            client.get_inference_statistics("affine")


def test_status_lists_what_is_registered_the_same_on_both_protocols(clients: Any) -> None:
    http, grpc = clients(HTTP), clients(GRPC)
    with region(4096) as (_, key):
        http.register_system_shared_memory("one", key.strip("/"), 64, offset=32)
        grpc.register_system_shared_memory("two", f"/{key}", 4096)
        expected = {
            "one": {"name": "one", "key": key.strip("/"), "offset": 32, "byte_size": 64},
            "two": {"name": "two", "key": key.strip("/"), "offset": 0, "byte_size": 4096},
        }
        assert {each["name"]: each for each in clients(HTTP).get_system_shared_memory_status()} == expected
        assert http.get_system_shared_memory_status("one") == [expected["one"]]
        regions = clients(GRPC).get_system_shared_memory_status().regions
        told = {
            name: {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size}
            for name, each in regions.items()
        }
        assert told == expected
        for client in (http, grpc):
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'three'"):
                client.get_system_shared_memory_status("three")
            with pytest.raises(InferenceServerException, match="CUDA shared memory is not offered"):
                client.register_cuda_shared_memory("c", b"AA==", 0, 64)
            with pytest.raises(InferenceServerException, match="its key is not allowed on this server"):
                client.register_system_shared_memory("other", "/psm_other", 64)
        assert grpc.get_cuda_shared_memory_status(as_json=True) == {}
        assert http.get_cuda_shared_memory_status() == []


def test_regions_outlive_a_frontend(node: Node, clients: Any) -> None:
    client = clients(HTTP)
    array = np.ones((1, 4), np.float32)
    with region(4096) as (handle, key):
        for name in ("in", "out"):
            client.register_system_shared_memory(name, key, 4096)
        old = node.pids("frontend")
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        until("new frontends", lambda: not set(old) & set(node.pids("frontend")) and node.full_strength())
        shm.set_shared_memory_region(handle, [array])
        inputs, outputs = tensors(HTTP, "INPUT", array, "OUTPUT")
        clients(HTTP).infer("affine", inputs, outputs=outputs)
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float32, [1, 4], offset=64), array * 2 + 1)


def test_the_registry_goes_with_the_node_and_both_grpc_servers_read_it(few_models: Path, tmp_path: Path) -> None:
    array = np.ones((1, 4), np.float32)
    with region(4096) as (handle, key):
        for server in ("grpcio", "fast"):
            (tmp_path / "node.yaml").write_text(
                NODE_FILE.replace("global: {", f"global: {{grpc: {{server: {server}}}, ")
            )
            shm.set_shared_memory_region(handle, [np.zeros(1024, np.float32)])
            shm.set_shared_memory_region(handle, [array])
            with Node(few_models, tmp_path / "run", frontends=1, node_file=tmp_path / "node.yaml") as node:
                with grpcclient.InferenceServerClient(f"127.0.0.1:{node.ports['grpc_port']}") as client:
                    assert not client.get_system_shared_memory_status().regions
                    for name in ("in", "out"):
                        client.register_system_shared_memory(name, key, 4096)
                    inputs, outputs = tensors(GRPC, "INPUT", array, "OUTPUT")
                    for _ in range(3):
                        client.infer("affine", inputs, outputs=outputs)
                assert oct((tmp_path / "run" / "client_memory.json").stat().st_mode)[-3:] == "600"
            found = shm.get_contents_as_numpy(handle, np.float32, [1, 4], offset=64)
            np.testing.assert_array_equal(found, array * 2 + 1)


def metrics(ports: dict[str, int]) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics_port']}/metrics") as answer:
        return str(answer.read().decode())


def in_flight(ports: dict[str, int]) -> float:
    lines = [line for line in metrics(ports).splitlines() if line.startswith("frontend_in_flight{")]
    return sum(float(line.split()[-1]) for line in lines)


def test_malformed_registrations_are_told(ports: dict[str, int]) -> None:
    url = f"http://127.0.0.1:{ports['http_port']}/v2/systemsharedmemory/region/r/register"
    for body in (b"", b"[]", b'{"key": "rst_x"}', b'{"key": 1, "byte_size": 1}', b'{"key": "rst_x", "byte_size": 1.5}'):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, body, method="POST"))
        with caught.value as answer:
            assert answer.code == 400
            assert "failed to parse the request JSON buffer" in json.loads(answer.read())["error"]
