"""What every server serves and is asked: the models as ONNX files, one request in every format, the right answer.

Models take ``X`` f32 and give ``Y`` f32. Weights and rows come from fixed seeds.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

BATCH = 32


@dataclass(frozen=True)
class Spec:
    """A model by its rows.

    Attributes:
        widths: of the layers of a perceptron; empty: the model returns what it gets.
        batch_sizes: what our bundle compiles; peers get BATCH as their largest batch.
    """

    name: str
    row_in: tuple[int, ...]
    row_out: tuple[int, ...]
    widths: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = (1, 8, BATCH)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in and one row out."""
        return 4 * (int(np.prod(self.row_in)) + int(np.prod(self.row_out)))


def _perceptron(name: str, *widths: int) -> Spec:
    return Spec(name, widths[:1], widths[-1:], widths)


MODELS = {
    spec.name: spec
    for spec in (
        _perceptron("mlp_a", 64, 64, 16),
        _perceptron("mlp_b", *[1024] * 5),
        _perceptron("mlp25m", *[1024] * 25),
        Spec("big", (3, 512, 512), (3, 512, 512), batch_sizes=(1, 2, 4)),
    )
}
"""Pure overhead; batching pays; 25 million weights; 3 MiB in and out."""


@dataclass(frozen=True)
class Payload:
    """One request, rendered once, in one format."""

    format: str
    body: bytes
    content_type: str
    header_bytes: int = 0


def write(spec: Spec, repository: Path) -> Path:
    """Write the model as a bundle of a repository of ours; return its ONNX file. Left alone if it is there."""
    path = repository / spec.name / "model.onnx"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    letters = "chw"[: len(spec.row_in)]
    (path.parent / "manifest.yaml").write_text(
        'format_version: "1"\nkind: model\n'
        + _tensor_text("executable_inputs", "X", letters, spec.row_in)
        + _tensor_text("executable_outputs", "Y", letters, spec.row_out)
        + f"batching: {{compiled_batch_sizes: {list(spec.batch_sizes)}}}\n"
    )
    unfinished = path.with_suffix(".part")
    onnx.save_model(_graph(spec), str(unfinished))
    unfinished.rename(path)
    return path


def row_of(spec: Spec) -> np.ndarray:
    """Return the row that is sent, as a batch of one."""
    values = np.random.default_rng(1).standard_normal((1, *spec.row_in)).astype(np.float32)
    # Six decimals: what JSON bodies of users look like.
    return np.round(values, 6)


def expected_of(path: Path, row: np.ndarray) -> np.ndarray:
    """Return the right answer, flat."""
    return _session(path).run(None, {"X": row})[0].ravel()


def raw_rows_per_s(path: Path, spec: Spec, seconds: float) -> float:
    """Run the model in a plain loop at its largest batch on one thread: what no server can exceed on one core."""
    session = _session(path)
    batch = np.repeat(row_of(spec), spec.batch_sizes[-1], axis=0)
    session.run(None, {"X": batch})
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        session.run(None, {"X": batch})
        runs += 1
    return runs * len(batch) / (time.perf_counter() - start)


def payload(spec: Spec, form: str) -> Payload:
    """Render the request: ``raw``, ``json``, ``v2bin``, ``v2json`` or ``grpc`` (with gRPC's message frame)."""
    row = row_of(spec)
    flat = [round(float(value), 6) for value in row.ravel()] if form.endswith("json") else []
    tensor = {"name": "X", "shape": list(row.shape), "datatype": "FP32"}
    match form:
        case "raw":
            return Payload(form, row.tobytes(), "application/octet-stream")
        case "json":
            return Payload(form, _compact({"X": flat}), "application/json")
        case "v2json":
            return Payload(form, _compact({"inputs": [{**tensor, "data": flat}]}), "application/json")
        case "v2bin":
            sized = {**tensor, "parameters": {"binary_data_size": row.nbytes}}
            head = _compact({"inputs": [sized], "parameters": {"binary_data_output": True}})
            return Payload(form, head + row.tobytes(), "application/octet-stream", len(head))
        case "grpc":
            return Payload(form, grpc_frame(_grpc_request(spec, row)), "application/grpc")
    raise ValueError(f"no such format: {form}")


def malformed(spec: Spec, form: str) -> Payload:
    """Render a request whose row is one element short."""
    short = row_of(spec).ravel()[:-1]
    flat = [round(float(value), 6) for value in short]
    tensor = {"name": "X", "shape": [1, len(short)], "datatype": "FP32"}
    match form:
        case "raw":
            return Payload(form, short.tobytes(), "application/octet-stream")
        case "json":
            return Payload(form, _compact({"X": flat}), "application/json")
    return Payload("v2json", _compact({"inputs": [{**tensor, "data": flat}]}), "application/json")


def shared_memory_payload(spec: Spec, region: str) -> Payload:
    """Render a request whose tensors lie in a registered region: the input first, the output behind it."""
    in_bytes, out_bytes = 4 * int(np.prod(spec.row_in)), 4 * int(np.prod(spec.row_out))
    given = {"shared_memory_region": region, "shared_memory_byte_size": in_bytes}
    wanted = {"shared_memory_region": region, "shared_memory_byte_size": out_bytes, "shared_memory_offset": in_bytes}
    body = {
        "inputs": [{"name": "X", "shape": [1, *spec.row_in], "datatype": "FP32", "parameters": given}],
        "outputs": [{"name": "Y", "parameters": wanted}],
    }
    return Payload("shm", _compact(body), "application/json")


def answer_values(form: str, body: bytes, header_bytes: int = 0) -> np.ndarray:
    """Return the output of an answer, flat.

    Raises:
        ValueError: the answer does not have the format.
    """
    try:
        match form:
            case "raw":
                return np.frombuffer(body, np.float32)
            case "json":
                return np.asarray(json.loads(body)["Y"], np.float32).ravel()
            case "v2json":
                return np.asarray(json.loads(body)["outputs"][0]["data"], np.float32).ravel()
            case "v2bin":
                return np.frombuffer(body[header_bytes:], np.float32)
            case "grpc":
                return np.frombuffer(_grpc_response(body[5:]), np.float32)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{form}: {error!r} in {body[:200]!r}") from error
    raise ValueError(f"no such format: {form}")


def grpc_frame(message: bytes) -> bytes:
    """Return a message as gRPC sends it: not compressed, length, message."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def _grpc_request(spec: Spec, row: np.ndarray) -> bytes:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=spec.name)
    given = request.inputs.add()
    given.name, given.datatype = "X", "FP32"
    given.shape.extend(row.shape)
    request.raw_input_contents.append(row.tobytes())
    return bytes(request.SerializeToString())


def _grpc_response(message: bytes) -> bytes:
    from tritonclient.grpc import service_pb2

    return bytes(service_pb2.ModelInferResponse.FromString(message).raw_output_contents[0])


def _compact(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _tensor_text(key: str, name: str, letters: str, row: tuple[int, ...]) -> str:
    dims = ", ".join(f"{letter}: {size}" for letter, size in zip(letters, row, strict=True))
    return f"{key}:\n  - {{name: {name}, dtype: f32, shape: n{letters}, dims: {{{dims}}}}}\n"


def _graph(spec: Spec) -> onnx.ModelProto:
    draw = np.random.default_rng(0)
    nodes, constants, current = [], [], "X"
    for layer, (rows, columns) in enumerate(zip(spec.widths, spec.widths[1:], strict=False)):
        weights = (draw.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
        constants.append(numpy_helper.from_array(weights, f"weights{layer}"))
        constants.append(numpy_helper.from_array(np.zeros(columns, np.float32), f"bias{layer}"))
        last = layer == len(spec.widths) - 2
        sums = "Y" if last else f"sums{layer}"
        nodes.append(helper.make_node("Gemm", [current, f"weights{layer}", f"bias{layer}"], [sums]))
        if not last:
            current = f"active{layer}"
            nodes.append(helper.make_node("Relu", [sums], [current]))
    if not spec.widths:
        nodes.append(helper.make_node("Identity", ["X"], ["Y"]))
    graph = helper.make_graph(
        nodes,
        spec.name,
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", *spec.row_in])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["n", *spec.row_out])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
