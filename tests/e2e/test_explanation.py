"""Why a batch had its size, told to clients that ask: parameters on both protocols, headers over HTTP, and a metric."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from engines.errors import Kind
from frontend.explanation import REASONS, explanation
from real_node import Node
from worker.channel.placement import Reply
from worker.channel.records import Reason

pytestmark = pytest.mark.process

KEYS = {
    "batch_size", "batch_rows", "batch_requests", "batch_reason", "batch_reason_text", "queue_us", "compute_us",
    "dispatch",
}  # fmt: skip
ASK = {"ringserve_explain": True}


def post(ports: dict[str, int], model: str, document: dict[str, Any], **headers: str) -> tuple[Any, dict[str, str]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{ports['http_port']}/v2/models/{model}/infer", json.dumps(document).encode(), headers
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read()), {name.lower(): value for name, value in answer.headers.items()}


def rows(count: int = 1, name: str = "INPUT") -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": "FP32", "shape": [count, 4], "data": [1.0] * (4 * count)}]}


def over_http(ports: dict[str, int], model: str, count: int) -> dict[str, Any]:
    told, _ = post(ports, model, rows(count) | {"parameters": ASK})
    assert isinstance(told["parameters"], dict)
    return told["parameters"]


def over_grpc(ports: dict[str, int], model: str, count: int) -> dict[str, Any]:
    with grpcclient.InferenceServerClient(f"127.0.0.1:{ports['grpc_port']}") as client:
        tensor = grpcclient.InferInput("INPUT", [count, 4], "FP32")
        tensor.set_data_from_numpy(np.ones((count, 4), np.float32))
        response = client.infer(model, [tensor], parameters=ASK).get_response()
    return {
        name: getattr(parameter, parameter.WhichOneof("parameter_choice"))
        for name, parameter in response.parameters.items()
    }


BOTH = pytest.mark.parametrize("ask", [over_http, over_grpc])
Ask = Callable[[dict[str, int], str, int], dict[str, Any]]


def test_nothing_is_added_unless_asked(ports: dict[str, int]) -> None:
    for document, headers in (
        (rows(), {}),
        (rows() | {"parameters": {"ringserve_explain": False}}, {}),
        (rows(), {"x-ringserve-explain": "0"}),
    ):
        told, answered = post(ports, "affine", document, **headers)
        assert "parameters" not in told
        assert not [name for name in answered if name.startswith("x-ringserve")]


@BOTH
def test_one_row_alone_says_why(ports: dict[str, int], ask: Ask) -> None:
    told = ask(ports, "affine", 1)
    assert told.keys() == KEYS
    assert (told["batch_rows"], told["batch_requests"]) == (1, 1)
    assert told["batch_size"] in (1, 8, 32)
    expected = "filled" if told["batch_size"] == 1 else "queue_drained"
    assert told["batch_reason"] == expected
    assert told["batch_reason_text"] == REASONS[Reason[expected.upper()]]
    assert told["queue_us"] >= 0 and told["compute_us"] >= 0 and told["dispatch"] > 0


@pytest.mark.parametrize("document", [rows(), rows() | {"parameters": ASK}])
def test_http_tells_the_same_in_headers(ports: dict[str, int], document: dict[str, Any]) -> None:
    headers = {} if "parameters" in document else {"x-ringserve-explain": "1"}
    told, answered = post(ports, "affine", document, **headers)
    found = {name: value for name, value in answered.items() if name.startswith("x-ringserve")}
    expected = {
        "x-ringserve-batch-" + key.removeprefix("batch_").replace("_", "-"): str(value)
        for key, value in told["parameters"].items()
    }
    assert told["parameters"].keys() == KEYS
    assert found == expected


def test_binary_answers_tell_it_too(ports: dict[str, int]) -> None:
    with httpclient.InferenceServerClient(f"127.0.0.1:{ports['http_port']}") as client:
        tensor = httpclient.InferInput("INPUT", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
        told = client.infer("affine", [tensor], headers={"x-ringserve-explain": "1"}).get_response()
    assert told["parameters"].keys() == KEYS


@BOTH
def test_a_request_in_pieces_says_how_many(ports: dict[str, int], ask: Ask) -> None:
    told = ask(ports, "affine", 70)
    assert told.keys() == KEYS | {"pieces"}
    assert told["pieces"] == 3
    assert told["batch_size"] in (8, 32)


def test_hooks_and_models_without_a_batch_axis(ports: dict[str, int]) -> None:
    text = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}], "parameters": ASK}
    told, _ = post(ports, "text", text)
    assert told["parameters"].keys() == KEYS
    assert told["parameters"]["batch_rows"] == 2
    whole = {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [6], "data": [0.0] * 6}], "parameters": ASK}
    told, _ = post(ports, "unbatched", whole)
    assert (told["parameters"]["batch_size"], told["parameters"]["batch_reason"]) == (0, "not_coalescing")


def test_requests_with_one_dispatch_number_ran_together(ports: dict[str, int]) -> None:
    with ThreadPoolExecutor(12) as pool:
        told = list(pool.map(lambda _: over_http(ports, "slow", 1), range(12)))
    together = Counter(each["dispatch"] for each in told)
    for each in told:
        assert each["batch_requests"] == each["batch_rows"] == together[each["dispatch"]]
    # While the first is executed the others come: they cannot all have run alone.
    assert len(together) < 12


@pytest.mark.parametrize(
    ("document", "headers", "text"),
    [
        (rows(), {"x-ringserve-explain": "yes"}, "x-ringserve-explain is 'yes', expected 1 or 0"),
        (rows() | {"parameters": {"ringserve_explain": 1}}, {}, "parameter 'ringserve_explain' must be a boolean"),
    ],
)
def test_what_is_no_yes_or_no_is_refused(
    ports: dict[str, int], document: dict[str, Any], headers: dict[str, str], text: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(ports, "affine", document, **headers)
    with caught.value as answer:
        assert answer.code == 400
        assert text in json.loads(answer.read())["error"]


def test_the_metric_counts_every_execution_once(node: Node, ports: dict[str, int]) -> None:
    def counts() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['metrics_port']}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return {
            line.split('reason="')[1].split('"')[0]: float(line.split()[-1])
            for line in lines
            if line.startswith("worker_dispatch_reason_total{") and 'model="mlp"' in line
        }

    before = counts()
    assert before.keys() == {reason.name.lower() for reason in Reason if reason is not Reason.NONE}
    for _ in range(5):
        post(ports, "mlp", {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}]})
    after = counts()
    assert sum(after.values()) - sum(before.values()) == 5


def test_every_reason_has_a_sentence_and_old_replies_have_none_to_tell() -> None:
    assert REASONS.keys() == set(Reason)
    told = explanation(Reply(Kind.OK, words=(1, 0, 1999, 2000, 0, 0, 0, 0)), 1)
    assert told == {
        "batch_size": 0, "batch_rows": 0, "batch_requests": 0, "batch_reason": "none",
        "batch_reason_text": REASONS[Reason.NONE], "queue_us": 1, "compute_us": 2, "dispatch": 0,
    }  # fmt: skip
