"""Changing a running node's policy: by command, over gRPC, across a worker's death; and who may."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from frontend.control.messages import message_class
from frontend.control.schema import RPCS, SERVICE
from frontend.node.link import Call, call_node
from frontend.node.status import Answer
from real_node import Node, until
from scheduler_node import add_affine, add_slow, ask, close_all, connections, counted, request, ringserve, rows

pytestmark = pytest.mark.process

NOT_WEIGHTS = ("0", "-1", "-0.0", "nan", "inf", "-inf", "1e999", "heavy", "", "1_0", "0x1", "1,5")


@pytest.fixture(scope="module")
def policy_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("policy_models")
    add_affine(root)
    add_slow(root, "slow", 10)
    (root / "broken").mkdir()
    (root / "broken" / "model.onnx").write_bytes(b"nonsense")
    return root


@pytest.fixture(scope="module")
def policy_node(policy_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("policy")
    node_file = directory / "node.yaml"
    node_file.write_text("global: {scheduler: {models: {affine: {weight: 2}, afine: {weight: 3}}}}")
    # One model fails on purpose, so the node serves but never says that it is ready.
    with Node(policy_models, directory / "run", frontends=1, node_file=node_file, wait_ready=False) as node:
        node.wait_state("degraded", 60)
        until("models loaded", lambda: len(weights(node)) == 2)
        yield node


def weights(node: Node) -> dict[str, float]:
    return {one["name"]: one["weight"] for one in ask(node, "policy")[0]["models"]}


def address(node: Node) -> str:
    import msgspec

    sock, line = call_node(str(node.run_dir), Call(ask="status"), 30)
    sock.close()
    return msgspec.json.decode(line, type=Answer).control


def control(channel: grpc.Channel, rpc: str, **fields: Any) -> Any:
    call = channel.unary_unary(
        f"/{SERVICE}/{rpc}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=message_class(f"{rpc}Response").FromString,
    )
    return call(message_class(f"{rpc}Request")(**fields), timeout=20)


def refused(channel: grpc.Channel, rpc: str, **fields: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        control(channel, rpc, **fields)
    return caught.value.code(), caught.value.details()  # type: ignore[attr-defined]


def test_a_setting_for_a_model_that_does_not_exist_is_named_in_a_warning(policy_node: Node) -> None:
    line = policy_node.wait_line("config.unknown_model")
    assert "WARNING" in line
    assert "global.scheduler.models.afine" in line
    assert "no model 'afine'" in line


def test_rule_32_the_command_shows_discipline_weights_depths_and_axes(policy_node: Node) -> None:
    run_dir = ("--run-dir", str(policy_node.run_dir))
    code, out, err = ringserve("policy", *run_dir, "--json", "affine")
    assert (code, err) == (0, "")
    (worker,) = json.loads(out)
    assert {key: worker[key] for key in ("worker", "residency_mode", "discipline")} == {
        "worker": "worker0", "residency_mode": "static", "discipline": "fair",
    }  # fmt: skip
    (model,) = worker["models"]
    assert (model["name"], model["version"], model["queue_depth"], model["effective_max_batch"]) == (
        "affine", "1", 0, 32,
    )  # fmt: skip
    assert model["batch_axis"] == {"input": "INPUT", "axis": 1}
    code, out, _ = ringserve("policy", *run_dir)
    assert code == 0
    assert out.splitlines()[0].startswith("worker0: discipline fair, sizing ")
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["affine", "slow"]
    assert [line.split()[-1] for line in out.splitlines()[2:]] == ["INPUT:1", "INPUT:1"]


def test_rule_29_the_command_sets_a_weight_and_waits_for_it(policy_node: Node) -> None:
    code, out, err = ringserve("policy", "affine", "--weight", "2.5", "--run-dir", str(policy_node.run_dir))
    assert (code, out, err) == (0, "affine: weight 2.5 (versions 1)\n", "")
    assert weights(policy_node)["affine"] == 2.5


@pytest.mark.parametrize("text", NOT_WEIGHTS)
def test_what_is_no_weight_is_refused_before_anything_is_asked(policy_node: Node, text: str) -> None:
    before = weights(policy_node)
    code, out, err = ringserve("policy", "affine", f"--weight={text}", "--run-dir", str(policy_node.run_dir))
    assert (code, out) == (2, "")
    assert err == f"ringserve: --weight: expected a number above 0, got {text!r}\n"
    assert weights(policy_node) == before


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("nowhere", "--weight", "1"), 1, "Request for unknown model: 'nowhere' is not found"),
        (("nowhere",), 1, "Request for unknown model: 'nowhere' is not found"),
        (("broken", "--weight", "1"), 1, "model 'broken' is UNAVAILABLE: "),
        (("affine", "--weight", "1e300"), 1, "weight: expected a number above 0 and at most 1099511627776, got 1e+300"),
        (("--weight", "1"), 2, "--weight: give the model it is for"),
    ],
)
def test_refusals_say_why_and_change_nothing(
    policy_node: Node, arguments: tuple[str, ...], code: int, text: str
) -> None:
    before = weights(policy_node)
    found, out, err = ringserve("policy", *arguments, "--run-dir", str(policy_node.run_dir))
    assert (found, out) == (code, "")
    assert err.startswith(f"ringserve: {text}")
    assert weights(policy_node) == before


def test_without_a_node_nothing_is_asked(tmp_path: Path) -> None:
    for command in ("policy", "metrics"):
        code, out, err = ringserve(command, "--run-dir", str(tmp_path))
        assert (code, out) == (2, "")
        assert err == f"ringserve: no node runs in {tmp_path}; give its run directory with --run-dir\n"


def test_rules_29_32_the_grpc_service_shows_and_changes_the_same(policy_node: Node) -> None:
    with grpc.insecure_channel(address(policy_node)) as channel:
        (worker,) = control(channel, "ModelControlStatus").workers
        assert (worker.worker, worker.discipline, worker.residency_mode) == ("worker0", "fair", "static")
        assert [model.name for model in worker.models] == ["affine", "slow"]
        (one,) = control(channel, "ModelControlStatus", model="affine").workers[0].models
        assert (one.batch_axis.input, one.batch_axis.axis, one.effective_max_batch) == ("INPUT", 1, 32)
        done = control(channel, "SetModelPolicy", model="affine", weight=4.0)
        assert (done.model, done.weight, list(done.versions)) == ("affine", 4.0, ["1"])
        assert weights(policy_node)["affine"] == 4.0
        (one,) = control(channel, "ModelControlStatus", model="affine").workers[0].models
        assert one.weight == 4.0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_the_grpc_service_refuses_bad_weights_and_keeps_the_old(policy_node: Node, weight: float) -> None:
    before = weights(policy_node)
    with grpc.insecure_channel(address(policy_node)) as channel:
        code, text = refused(channel, "SetModelPolicy", model="affine", weight=weight)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == f"weight: expected a number above 0 and at most 1099511627776, got {weight!r}"
    assert weights(policy_node) == before


def test_the_grpc_service_tells_unknown_models_and_what_it_does_not_have(policy_node: Node) -> None:
    unknown = (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nowhere' is not found")
    with grpc.insecure_channel(address(policy_node)) as channel:
        assert refused(channel, "SetModelPolicy", model="nowhere", weight=1.0) == unknown
        assert refused(channel, "ModelControlStatus", model="nowhere") == unknown
        for rpc, fields in (("SetModelResidency", {"model": "affine"}), ("Compact", {"reload": ["affine"]})):
            code, text = refused(channel, rpc, **fields)
            assert code is grpc.StatusCode.UNIMPLEMENTED
            assert text.startswith(f"{rpc} is not available yet")
        call = channel.unary_unary(f"/{SERVICE}/SetModelPolicy")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff", timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_reflection_describes_the_control_service(policy_node: Node) -> None:
    with grpc.insecure_channel(address(policy_node)) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
        ]
        listed, described = stub.ServerReflectionInfo(iter(asked), timeout=20)
    assert SERVICE in {one.name for one in listed.list_services_response.service}
    file = FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
    assert [method.name for method in file.service[0].method] == list(RPCS)


def test_the_control_service_is_not_on_the_public_ports(policy_node: Node) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{policy_node.ports['grpc_port']}") as channel:
        code, _ = refused(channel, "SetModelPolicy", model="affine", weight=1.0)
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_the_sockets_are_the_users_alone(policy_node: Node) -> None:
    with grpc.insecure_channel(address(policy_node)) as channel:
        control(channel, "ModelControlStatus")
    for name in ("node.sock", "control.sock", "rpc.sock"):
        assert stat.S_IMODE(os.stat(policy_node.run_dir / name).st_mode) == 0o600, name


def test_a_live_weight_outlives_the_worker_but_not_the_node(policy_models: Path, tmp_path: Path) -> None:
    node_file = tmp_path / "node.yaml"
    node_file.write_text("global: {scheduler: {models: {affine: {weight: 2, max_batch_size: 8}}}}")

    def loaded(node: Node, pid: int) -> bool:
        return node.pids("worker") not in ([], [0], [pid]) and len(weights(node)) == 2

    with Node(policy_models, tmp_path / "run", frontends=1, node_file=node_file, wait_ready=False) as node:
        node.wait_state("degraded", 60)
        until("models loaded", lambda: len(weights(node)) == 2)
        ask(node, "policy", model="affine", weight=7)
        ask(node, "policy", model="slow", weight=0.5)
        (worker,) = node.pids("worker")
        start = node.line_count()
        os.kill(worker, signal.SIGKILL)
        node.wait_line("worker.started", start=start)
        until("models loaded again", lambda: loaded(node, worker))
        assert weights(node) == {"affine": 7.0, "slow": 0.5}
        # Only the weight is live: the rest of what the node file says of the model stays.
        assert counted(node, "affine")["effective_max_batch"] == 8
        assert node.stop() == 0
    with Node(policy_models, tmp_path / "run", frontends=1, node_file=node_file, wait_ready=False) as node:
        node.wait_state("degraded", 60)
        until("models loaded", lambda: len(weights(node)) == 2)
        assert weights(node) == {"affine": 2.0, "slow": 1.0}


def test_grpc_is_loaded_by_the_first_caller_only_and_a_loopback_port_works(policy_models: Path, tmp_path: Path) -> None:
    def holds_grpc(pid: int) -> bool:
        return "cygrpc" in Path(f"/proc/{pid}/maps").read_text()

    settings = {"INFERENCE_SERVER_CONTROL_ENDPOINT": "127.0.0.1:0"}
    with Node(policy_models, tmp_path / "run", frontends=1, wait_ready=False, env=settings) as node:
        node.wait_state("degraded", 60)
        assert node.process is not None
        target = address(node)
        assert target.startswith("127.0.0.1:")
        assert not (node.run_dir / "control.sock").exists()
        ask(node, "policy")
        assert not holds_grpc(node.process.pid)
        with grpc.insecure_channel(target) as channel:
            assert control(channel, "ModelControlStatus").workers[0].worker == "worker0"
        assert holds_grpc(node.process.pid)
        assert node.stop() == 0
        assert "Traceback" not in node.log()


def test_an_endpoint_that_others_reach_stops_the_start(policy_models: Path, tmp_path: Path) -> None:
    node_file = tmp_path / "node.yaml"
    node_file.write_text("global: {control: {endpoint: '0.0.0.0:0'}}")
    code, out, err = ringserve(
        "serve", "--models", str(policy_models), "--run-dir", str(tmp_path / "run"), "--node", str(node_file)
    )
    assert (code, out) == (2, "")
    assert err.startswith("ringserve: global.control.endpoint: '0.0.0.0:0' may be reached from other machines")


@pytest.mark.slow
def test_rule_29_a_live_weight_moves_device_time(tmp_path: Path) -> None:
    """Under 1:1 two busy models share the device; after 4:1 the heavier one gets about four fifths."""
    models = tmp_path / "models"
    for name in ("left", "right"):
        add_slow(models, name, 10)
    node_file = tmp_path / "node.yaml"
    node_file.write_text("global: {scheduler: {ema_halflife_seconds: 0.3}}")

    async def share(node: Node, dispatches: int) -> float:
        """Return the part of device time that ``left`` gets while both are always backlogged."""
        opened = {name: await connections(node.ports["http_port"], 6) for name in ("left", "right")}
        before = {name: counted(node, name)["total_compute_seconds"] for name in opened}
        done = 0

        async def caller(connection: Any, name: str) -> None:
            nonlocal done
            while done < dispatches:
                status, _ = await connection.call(request(name, rows(1)))
                assert status == 200
                done += 1

        await asyncio.gather(*(caller(one, name) for name, group in opened.items() for one in group))
        used = {name: counted(node, name)["total_compute_seconds"] - before[name] for name in opened}
        for group in opened.values():
            close_all(group)
        return used["left"] / sum(used.values())

    with Node(models, tmp_path / "run", frontends=1, node_file=node_file) as node:
        assert 0.4 < asyncio.run(share(node, 200)) < 0.6
        ask(node, "policy", model="left", weight=4)
        assert 0.7 < asyncio.run(share(node, 400)) < 0.9
