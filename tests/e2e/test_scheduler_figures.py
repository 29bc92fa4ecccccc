"""Whoever tells figures tells the same: Prometheus, KServe statistics on both protocols, ``scheduler_metrics``."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client.samples import Sample

import onnx_models
from frontend.kserve.proto import message_class
from real_node import Node, raw_output
from scheduler_node import (
    INFER,
    add_affine,
    ask,
    close_all,
    connections,
    counted,
    grpc_request,
    manifest,
    request,
    ringserve,
    rows,
    scrape,
    total,
)  # fmt: skip

pytestmark = pytest.mark.process

NS = 1_000_000_000
STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"
RULE_31 = (
    "worker_dispatch_total", "worker_compute_seconds_total", "worker_queue_depth", "worker_queue_wait_seconds_count",
    "worker_requests_served_total", "worker_rows_served_total", "worker_model_max_batch_size",
    "worker_batch_rows_count", "worker_padding_rows_total", "worker_requests_shed_total",
)  # fmt: skip


@pytest.fixture(scope="module")
def figures_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("figures_models")
    add_affine(root)
    onnx_models.poison(root / "poison")
    (root / "poison" / "manifest.yaml").write_text(manifest([1, 8, 32]))
    onnx_models.unbatched(root / "unbatched")
    (root / "unbatched" / "manifest.yaml").write_text(
        'format_version: "1"\nkind: model\n'
        "executable_inputs:\n  - {name: INPUT, dtype: f32, shape: c, dims: {c: 6}}\n"
        "executable_outputs:\n  - {name: OUTPUT, dtype: f32, shape: c, dims: {c: 6}}\n"
    )
    return root


@pytest.fixture(scope="module", params=[1, 4], ids=["1-frontend", "4-frontends"])
def figures_node(
    request: pytest.FixtureRequest, figures_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Node, dict[str, int]]]:
    with Node(figures_models, tmp_path_factory.mktemp("figures"), frontends=request.param) as node:
        node.wait_full_strength()
        yield node, node.ports


def statistics_http(ports: dict[str, int], model: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['http_port']}/v2/models/{model}/stats", timeout=10) as answer:
        (one,) = json.load(answer)["model_stats"]
    assert isinstance(one, dict)
    return one


def statistics_grpc(ports: dict[str, int], model: str) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
        call = channel.unary_unary(
            STATISTICS, response_deserializer=message_class("ModelStatisticsResponse").FromString
        )
        (one,) = call(message_class("ModelStatisticsRequest")(name=model).SerializeToString(), timeout=10).model_stats
    return one


def lasting(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that time alone does not change."""
    for one in metrics["worker0"].values():
        del one["recent_compute_ema_seconds"]
    return metrics


def whole_ns(seconds: float) -> int:
    return round(seconds * NS)


def check_agreement(node: Node, ports: dict[str, int], model: str) -> tuple[list[Sample], dict[str, Any]]:
    """Compare every figure that two places tell; return the samples and the scheduler's own counts."""
    samples, web, rpc, own = (
        scrape(ports), statistics_http(ports, model), statistics_grpc(ports, model), counted(node, model),
    )  # fmt: skip

    def prometheus(name: str) -> float:
        return total(samples, name, model=model, version="1", worker="worker0", gpu="")

    dispatches = own["dispatch_count"]
    assert dispatches == prometheus("worker_dispatch_total") == prometheus("worker_batch_rows_count")
    assert dispatches == web["execution_count"] == rpc.execution_count == sum(own["batch_sizes"].values())
    assert own["rows_served"] == prometheus("worker_rows_served_total") == prometheus("worker_batch_rows_sum")
    assert own["rows_served"] == web["inference_count"] == rpc.inference_count
    assert own["requests_served"] == prometheus("worker_requests_served_total")
    assert own["requests_served"] == web["inference_stats"]["success"]["count"] == rpc.inference_stats.success.count
    assert own["padding_rows"] == prometheus("worker_padding_rows_total")
    compute_ns = whole_ns(own["total_compute_seconds"])
    assert compute_ns == whole_ns(prometheus("worker_compute_seconds_total"))
    assert compute_ns == sum(batch["compute_infer"]["ns"] for batch in web["batch_stats"])
    assert compute_ns == sum(batch.compute_infer.ns for batch in rpc.batch_stats)
    sizes = {str(batch["batch_size"]): batch["compute_infer"]["count"] for batch in web["batch_stats"]}
    assert own["batch_sizes"] == sizes == {str(one.batch_size): one.compute_infer.count for one in rpc.batch_stats}
    assert own["queue_depth"] == prometheus("worker_queue_depth") == 0
    assert own["effective_max_batch"] == prometheus("worker_model_max_batch_size")
    shed = {one.labels["reason"]: one.value for one in samples
            if one.name == "worker_requests_shed_total" and one.labels["model"] == model}  # fmt: skip
    assert {reason: count for reason, count in shed.items() if count} == own["shed"]
    for name in ("fail", "success", "queue", "compute_input", "compute_infer", "compute_output"):
        mine, theirs = web["inference_stats"][name], getattr(rpc.inference_stats, name)
        assert (mine["count"], mine["ns"]) == (theirs.count, theirs.ns), name
    (status,) = ask(node, "policy", model=model)
    (entry,) = status["models"]
    assert {key: entry[key] for key in ("dispatch_count", "requests_served", "rows_served", "effective_max_batch")} == {
        key: own[key] for key in ("dispatch_count", "requests_served", "rows_served", "effective_max_batch")
    }
    assert whole_ns(entry["compute_seconds"]) == compute_ns
    return samples, own


def check_histogram(samples: list[Sample], name: str, **labels: str) -> None:
    """A histogram's buckets never decrease, and the last holds every observation."""
    buckets = [
        one for one in samples if one.name == f"{name}_bucket" and labels.items() <= one.labels.items()
    ]  # fmt: skip
    counts = [one.value for one in sorted(buckets, key=lambda one: float(one.labels["le"]))]
    assert counts == sorted(counts)
    assert counts[-1] == total(samples, f"{name}_count", **labels)


def test_rules_30_31_a_known_workload_is_told_alike_everywhere(figures_node: tuple[Node, dict[str, int]]) -> None:
    node, ports = figures_node
    before = counted(node, "affine")
    asked = before_ok = total(scrape(ports), "frontend_requests_total", model="affine", outcome="ok")

    async def run() -> int:
        opened = await connections(ports["http_port"], 24)
        draw = np.random.default_rng(3)
        sent = 0
        for _ in range(6):
            arrays = [rows(int(draw.integers(1, 8))) for _ in opened]
            answers = await asyncio.gather(
                *(one.call(request("affine", array)) for one, array in zip(opened, arrays, strict=True))
            )
            assert all(status == 200 for status, _ in answers)
            sent += sum(len(array) for array in arrays)
        # Above every compiled size: three pieces of 32 rows and one of 4, each a request to the worker.
        status, body = await opened[0].call(request("affine", rows(100)))
        assert (status, len(raw_output(body, 4))) == (200, 100)
        close_all(opened)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
            call = channel.unary_unary(INFER)
            await asyncio.gather(*(call(grpc_request("affine", rows(2))) for _ in range(20)))
        return sent + 100 + 40

    sent_rows = asyncio.run(run())
    samples, own = check_agreement(node, ports, "affine")
    assert own["rows_served"] - before["rows_served"] == sent_rows
    assert own["requests_served"] - before["requests_served"] == 6 * 24 + 4 + 20
    # The queue's histogram holds every request once, and the frontends' add up to what clients sent.
    assert total(samples, "worker_queue_wait_seconds_count", model="affine") == own["requests_served"]
    web = statistics_http(ports, "affine")["inference_stats"]["queue"]
    assert web["ns"] == whole_ns(total(samples, "worker_queue_wait_seconds_sum", model="affine"))
    assert web["count"] == own["requests_served"]
    asked += 6 * 24 + 1 + 20
    assert total(samples, "frontend_requests_total", model="affine", outcome="ok") == asked > before_ok
    assert total(samples, "frontend_request_seconds_count", model="affine") == asked
    for name in ("worker_queue_wait_seconds", "worker_batch_rows", "frontend_request_seconds"):
        check_histogram(samples, name, model="affine")


def test_a_batch_that_failed_and_was_run_again_is_told_alike(figures_node: tuple[Node, dict[str, int]]) -> None:
    node, ports = figures_node
    before = counted(node, "poison")

    async def run() -> None:
        opened = await connections(ports["http_port"], 12)
        arrays = [rows(1, float(number)) for number in range(11)] + [rows(1, onnx_models.POISON)]
        answers = await asyncio.gather(
            *(one.call(request("poison", array)) for one, array in zip(opened, arrays, strict=True))
        )
        assert sorted(status for status, _ in answers) == [200] * 11 + [500]
        close_all(opened)

    asyncio.run(run())
    samples, own = check_agreement(node, ports, "poison")
    assert own["requests_served"] - before["requests_served"] == 11
    assert own["rows_served"] - before["rows_served"] == 11
    assert total(samples, "frontend_requests_total", model="poison", outcome="engine_failed") >= 1
    assert total(samples, "worker_failed_dispatch_total", model="poison") >= 1


def test_rule_10_a_model_without_a_batch_axis_is_told_alike(figures_node: tuple[Node, dict[str, int]]) -> None:
    node, ports = figures_node

    async def run() -> None:
        opened = await connections(ports["http_port"], 5)
        lone = np.ones(6, np.float32)
        answers = await asyncio.gather(*(one.call(request("unbatched", lone)) for one in opened))
        assert [status for status, _ in answers] == [200] * 5
        close_all(opened)

    before = counted(node, "unbatched")
    asyncio.run(run())
    _, own = check_agreement(node, ports, "unbatched")
    assert own["dispatch_count"] - before["dispatch_count"] == 5
    assert set(own["batch_sizes"]) == {"0"}


def test_rule_31_every_series_has_the_labels_model_gpu_and_worker(figures_node: tuple[Node, dict[str, int]]) -> None:
    _, ports = figures_node
    samples = scrape(ports)
    for name in RULE_31:
        found = [one.labels for one in samples if one.name == name and one.labels["model"] == "affine"]
        assert found, name
        assert all(labels["worker"] == "worker0" and "gpu" in labels for labels in found), name


def test_the_command_tells_the_same(figures_node: tuple[Node, dict[str, int]]) -> None:
    node, _ = figures_node
    run_dir = ("--run-dir", str(node.run_dir))
    code, out, err = ringserve("metrics", *run_dir, "--json")
    assert (code, err) == (0, "")
    assert lasting(json.loads(out)) == lasting(ask(node, "metrics"))
    code, out, _ = ringserve("metrics", *run_dir, "affine")
    assert code == 0
    own = counted(node, "affine")
    line = next(line for line in out.splitlines() if line.startswith("affine/1"))
    assert line.split()[1:4] == [str(own[key]) for key in ("dispatch_count", "requests_served", "rows_served")]
    code, out, err = ringserve("metrics", *run_dir, "nowhere")
    assert (code, out) == (1, "")
    assert err == "ringserve: Request for unknown model: 'nowhere' is not found\n"
