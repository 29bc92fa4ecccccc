"""What upstreams do wrong, and which of it moves a call to another route."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_world import GatewayWorld, model, route

import openai
from frontend.openai import calls
from frontend.openai.addresses import read_endpoint
from frontend.openai.breaker_state import Phase
from frontend.openai.calls import GatewayCall, Sent
from frontend.openai.principal import Principal, Role
from frontend.openai.upstream import UpstreamClient
from real_node import until
from stub_upstream import Say, StubUpstream

MESSAGES: Any = [{"role": "user", "content": "hi"}]
WHO = Principal("ws_a", "key_x", Role.MEMBER)


def dead_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"


@pytest.fixture
def world(stub: StubUpstream, other_stub: StubUpstream, tmp_path: Path) -> Iterator[GatewayWorld]:
    models = (
        model("one", route("one0", stub.url, upstream_model="inner-name", failures_to_open=3, cooldown_seconds=60.0)),
        model("two", route("two0", stub.url), route("two1", other_stub.url)),
        model("absent", route("absent0", dead_url()), route("absent1", stub.url)),
        model("gone", route("gone0", dead_url(), failures_to_open=1)),
        model("hurried", route("hurried0", stub.url, timeout_seconds=0.2), route("hurried1", other_stub.url)),
    )
    with GatewayWorld(tmp_path, *models) as running:
        yield running


def ask(world: GatewayWorld, name: str) -> dict[str, Any]:
    """Return status, error and headers of a failed call, or status 200."""
    with world.client() as client:
        try:
            client.chat.completions.create(model=name, messages=MESSAGES)
        except openai.APIStatusError as caught:
            error: dict[str, Any] = dict(caught.body)  # type: ignore[call-overload]
            return {"status": caught.status_code, **error, "headers": caught.response.headers}
    return {"status": 200}


def vllm(message: str, error_type: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


VLLM_BUSY = vllm("The engine is currently busy", "Service Unavailable", 503)
VLLM_404 = vllm("The model `inner-name` does not exist.", "NotFoundError", 404, "model")


@pytest.mark.parametrize(
    ("said", "status", "code", "error_type", "message"),
    [
        (Say(400, {"error": {"message": "too long", "type": "BadRequestError", "param": "max_tokens", "code": 400}}),
         400, None, "invalid_request_error", "too long"),
        (Say(404, VLLM_404), 404, "model_not_found", "invalid_request_error", "`one`"),
        (Say(404, {"detail": "Not Found"}),
         404, "unsupported_endpoint", "invalid_request_error", "/v1/chat/completions"),
        (Say(404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}),
         404, "unsupported_endpoint", "invalid_request_error", "does not offer"),
        (Say(422, {"detail": [{"loc": ["body", "input"], "msg": "Field required", "type": "missing"}]}),
         422, None, "invalid_request_error", "body.input: Field required"),
        (Say(503, VLLM_BUSY), 503, "upstream_busy", "server_error", "busy"),
        (Say(503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}),
         503, "upstream_busy", "unavailable_error", "Loading model"),
        (Say(429, {"error": {"message": "slow down", "type": "tokens", "param": None, "code": "rate_limit_exceeded"}}),
         429, "rate_limit_exceeded", "tokens", "slow down"),
        (Say(500, {"error": "a text"}), 500, None, "server_error", "a text"),
        (Say(500, b"<html>secret stack</html>", content_type="text/html"), 500, None, "server_error", "text/html"),
        (Say(500, b"", content_type=""), 500, None, "server_error", "empty"),
        (Say(502, b"bad gateway", content_type="text/plain"), 502, "upstream_error", "server_error", "bad gateway"),
        (Say(401, {"error": {"message": "Incorrect API key provided: sk-up", "code": "invalid_api_key"}}),
         502, "upstream_refused_gateway", "server_error", "own key"),
        (Say(302, b"", headers={"Location": "http://127.0.0.1:1/"}), 502, "upstream_error", "server_error", "302"),
        (Say(200, {"error": {"message": "x"}}), 502, "upstream_error", "server_error", "200 with an error"),
        (Say(200, b"<html>hi</html>", content_type="text/html"), 502, "upstream_error", "server_error", "not JSON"),
        (Say(200, b"{}", headers={"Content-Encoding": "gzip"}), 502, "upstream_error", "server_error", "compressed"),
        (Say(fault="garbage"), 502, "upstream_error", "server_error", "HTTP"),
        (Say(fault="reset"), 502, "upstream_error", "server_error", "closed the connection"),
        (Say(body={"a": "b" * 100}, fault="cut"), 502, "upstream_error", "server_error", "closed the connection"),
    ],
)  # fmt: skip
def test_errors_of_upstreams_in_one_shape(
    world: GatewayWorld, stub: StubUpstream, said: Say, status: int, code: str | None, error_type: str, message: str
) -> None:
    stub.say(said)
    told = ask(world, "one")
    assert (told["status"], told["code"], told["type"]) == (status, code, error_type)
    assert message in told["message"]
    assert {"message", "type", "param", "code"} <= told.keys()
    for secret in ("inner-name", "sk-up", "secret stack", "127.0.0.1"):
        assert secret not in json.dumps({key: value for key, value in told.items() if key != "headers"})
    assert len(stub.calls) == 1


def test_the_inner_name_of_a_model_stays_inside(world: GatewayWorld, stub: StubUpstream) -> None:
    stub.say(Say(404, VLLM_404))
    assert "inner-name" not in ask(world, "one")["message"]


def test_retry_after_is_passed_and_other_headers_are_not(world: GatewayWorld, stub: StubUpstream) -> None:
    headers = {
        "Retry-After": "7", "retry-after-ms": "7000", "x-ratelimit-remaining-requests": "0", "x-should-retry": "true",
        "Set-Cookie": "a=b", "Server": "inner", "x-request-id": "up-1",
    }  # fmt: skip
    stub.say(Say(429, {"error": {"message": "m"}}, headers=headers))
    got = ask(world, "one")["headers"]
    assert (got["retry-after"], got["retry-after-ms"], got["x-should-retry"]) == ("7", "7000", "true")
    assert got["x-ratelimit-remaining-requests"] == "0"
    assert got["x-upstream-request-id"] == "up-1"
    assert "set-cookie" not in got
    assert "server" not in got


def test_the_sdk_retries_as_it_is_told(world: GatewayWorld, stub: StubUpstream) -> None:
    with world.client(max_retries=2) as client:
        stub.say(Say(429, {"error": {"message": "m"}}, headers={"retry-after-ms": "1"}))
        client.chat.completions.create(model="one", messages=MESSAGES)
        assert len(stub.calls) == 2
        # Permanent, although 502: the gateway says that trying again cannot help.
        stub.say(Say(401, {"error": {"message": "m"}}))
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="one", messages=MESSAGES)
        assert len(stub.calls) == 3


# BG-20: one attempt per route


def test_bg_20_a_failed_call_is_sent_once(world: GatewayWorld, stub: StubUpstream) -> None:
    stub.default = lambda seen: Say(503, VLLM_BUSY)
    assert ask(world, "one")["status"] == 503
    assert len(stub.calls) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_bg_20_a_declined_call_goes_to_each_other_route_once(
    world: GatewayWorld, stub: StubUpstream, other_stub: StubUpstream, status: int
) -> None:
    stub.default = other_stub.default = lambda seen: Say(status, VLLM_BUSY, headers={"Retry-After": "3"})
    told = ask(world, "two")
    assert (told["status"], told["headers"]["retry-after"]) == (status, "3")
    assert (len(stub.calls), len(other_stub.calls)) == (1, 1)


def test_a_declined_call_is_answered_by_the_next_route(
    world: GatewayWorld, stub: StubUpstream, other_stub: StubUpstream
) -> None:
    stub.say(Say(503, VLLM_BUSY, headers={"Retry-After": "20"}))
    assert ask(world, "two")["status"] == 200
    assert (len(stub.calls), len(other_stub.calls)) == (1, 1)
    # The busy one is left alone for as long as it asked.
    assert ask(world, "two")["status"] == 200
    assert (len(stub.calls), len(other_stub.calls)) == (1, 2)


def test_a_stream_moves_on_before_its_first_byte(
    world: GatewayWorld, stub: StubUpstream, other_stub: StubUpstream
) -> None:
    stub.say(Say(503, VLLM_BUSY))
    with world.client() as client:
        stream = client.chat.completions.create(model="two", messages=MESSAGES, stream=True)
        assert "".join(one.choices[0].delta.content or "" for one in stream) == "Hello there"
    assert (len(stub.calls), len(other_stub.calls)) == (1, 1)
    # The client may see the end of the stream before the call's own end is counted.
    until("no live call", lambda: world.route("two0").live == world.route("two1").live == 0)


def test_an_absent_upstream_is_passed_over(world: GatewayWorld, stub: StubUpstream) -> None:
    assert ask(world, "absent")["status"] == 200
    assert len(stub.calls) == 1


@pytest.mark.parametrize("fault", ["reset", "garbage", "cut"])
def test_what_may_have_run_is_not_sent_to_another_route(
    world: GatewayWorld, stub: StubUpstream, other_stub: StubUpstream, fault: str
) -> None:
    stub.say(Say(body={"a": "b" * 100}, fault=fault))
    assert ask(world, "two")["status"] == 502
    assert (len(stub.calls), len(other_stub.calls)) == (1, 0)


@pytest.mark.parametrize("status", [400, 404, 500])
def test_an_answer_is_final(world: GatewayWorld, stub: StubUpstream, other_stub: StubUpstream, status: int) -> None:
    stub.say(Say(status, {"error": {"message": "m"}}))
    assert ask(world, "two")["status"] == status
    assert not other_stub.calls


def test_a_late_answer_is_504_and_the_upstream_is_left(
    world: GatewayWorld, stub: StubUpstream, other_stub: StubUpstream
) -> None:
    stub.say(Say(fault="silence"))
    told = ask(world, "hurried")
    assert (told["status"], told["code"]) == (504, "timeout")
    stub.wait(lambda one: one.lost == 1)
    assert not other_stub.calls


def test_an_unreachable_upstream_then_a_cooling_route(world: GatewayWorld) -> None:
    told = ask(world, "gone")
    assert (told["status"], told["code"]) == (502, "upstream_unreachable")
    again = ask(world, "gone")
    assert (again["status"], again["code"]) == (503, "route_cooling")
    assert 1 <= int(again["headers"]["retry-after"]) <= 31
    plan = world.service.gateway.plan(calls.CHAT, "gone")
    assert plan.route == ""
    assert plan.cooling_s is not None


def test_a_breaker_opens_on_lost_connections_not_on_500(world: GatewayWorld, stub: StubUpstream) -> None:
    for _ in range(5):
        stub.say(Say(500, {"error": {"message": "m"}}))
        ask(world, "one")
    assert world.route("one0").breaker.phase is Phase.CLOSED
    for _ in range(3):
        stub.say(Say(fault="reset"))
        ask(world, "one")
    assert world.route("one0").breaker.phase is Phase.OPEN
    assert len(stub.calls) == 8
    assert ask(world, "one")["code"] == "route_cooling"
    assert len(stub.calls) == 8


def test_redirects_are_not_followed(world: GatewayWorld, stub: StubUpstream, other_stub: StubUpstream) -> None:
    stub.say(Say(307, b"", headers={"Location": f"{other_stub.url}/chat/completions"}))
    assert ask(world, "one")["status"] == 502
    assert not other_stub.calls


# The path that batch lines take


def line(world: GatewayWorld, name: str, **more: Any) -> calls.UpstreamAnswer:
    more.setdefault("body", json.dumps({"model": name, "messages": [], "priority": -5, "stream": True}).encode())
    call = GatewayCall(more.pop("endpoint", calls.CHAT), model=name, principal=WHO, batch=True, **more)
    return world.run(world.service.gateway.execute(call))


def test_item_13_a_line_is_sent_once_on_its_route_and_never_streamed(
    world: GatewayWorld, stub: StubUpstream, other_stub: StubUpstream
) -> None:
    stub.say(Say(503, VLLM_BUSY, headers={"Retry-After": "9"}))
    answer = line(world, "two", route="two0")
    assert (answer.status, answer.sent, answer.retry_after_s, answer.route) == (503, Sent.DECLINED, 9.0, "two0")
    assert (len(stub.calls), len(other_stub.calls)) == (1, 0)
    assert stub.calls[0].json.keys() == {"model", "messages"}
    assert stub.calls[0].headers["x-ringserve-traffic"] == "batch"


def test_a_line_has_usage_and_the_public_name(world: GatewayWorld, stub: StubUpstream) -> None:
    answer = line(world, "one", route="one0")
    assert answer.ok
    assert answer.usage == calls.Usage(10, 5)
    assert json.loads(answer.body)["model"] == "one"
    assert stub.calls[0].json["model"] == "inner-name"


def test_item_13_a_line_without_its_route_is_an_unknown_model(world: GatewayWorld, stub: StubUpstream) -> None:
    answer = line(world, "two", route="removed")
    assert (answer.status, answer.code, answer.sent) == (404, "model_not_found", Sent.NOT_SENT)
    assert not stub.calls


def test_a_priority_hint_goes_only_where_it_is_understood(tmp_path: Path, stub: StubUpstream) -> None:
    models = (
        model("able", route("a", stub.url, kind="vllm"), route("c", stub.url, kind="openai_compatible")),
        model("unable", route("b", stub.url, kind="openai")),
    )
    with GatewayWorld(tmp_path, *models, allow_client_priority=True) as world:
        line(world, "able", route="a", priority=7)
        line(world, "able", route="a")
        line(world, "able", route="c", priority=7)
        line(world, "unable", route="b", priority=7)
    assert [body.get("priority") for body in stub.bodies()] == [7, None, 7, None]


@pytest.mark.parametrize(("fault", "sent"), [("reset", Sent.MAYBE_RUN), ("cut", Sent.MAYBE_RUN)])
def test_a_lost_line_says_that_it_may_have_run(world: GatewayWorld, stub: StubUpstream, fault: str, sent: Sent) -> None:
    stub.say(Say(body={"a": "b" * 100}, fault=fault))
    answer = line(world, "one", route="one0")
    assert (answer.status, answer.sent) == (502, sent)


def test_a_line_that_was_never_sent_says_so(world: GatewayWorld) -> None:
    answer = line(world, "gone", route="gone0")
    assert (answer.status, answer.sent, answer.code) == (502, Sent.NOT_SENT, "upstream_unreachable")


def test_bg_16_lines_are_not_live_traffic(world: GatewayWorld, stub: StubUpstream) -> None:
    seen: list[tuple[int, int]] = []
    world.service.gateway.routes.on_change = lambda one: seen.append((one.live, one.batch))
    line(world, "one", route="one0")
    ask(world, "one")
    assert seen == [(1, 0), (0, 0)]


def test_plans_follow_the_policy_and_start_nothing(world: GatewayWorld, stub: StubUpstream) -> None:
    gateway = world.service.gateway
    assert gateway.plan(calls.CHAT, "two") == calls.Plan("two0")
    assert gateway.plan(calls.CHAT, "unknown") == calls.Plan("")
    assert not stub.calls


def test_figures_are_told(world: GatewayWorld, stub: StubUpstream) -> None:
    stub.say(Say(503, VLLM_BUSY))
    ask(world, "two")
    ask(world, "unknown")
    told = {(one.name, tuple(sorted(one.labels.items()))): one for one in world.service.series()}
    kind = ("kind", "openai_compatible")
    assert told["gateway_calls_total", (kind, ("outcome", "busy"), ("traffic", "live"))].value == 1
    assert told["gateway_calls_total", (kind, ("outcome", "ok"), ("traffic", "live"))].value == 1
    assert told["gateway_failovers_total", ()].value == 1
    assert told["gateway_unrouted_total", ()].value == 1
    assert sum(told["gateway_upstream_seconds", (kind,)].counts) == 2
    assert told["gateway_in_flight", (("route", "two0"), ("traffic", "live"))].value == 0
    assert all(type(one.value) in (int, float) for one in told.values())


def test_a_server_is_reached_for_without_a_call(world: GatewayWorld, stub: StubUpstream) -> None:
    gateway = world.service.gateway
    reached = {name: world.run(gateway.reach(name)) for name in ("one0", "gone0", "no-such-route")}
    assert reached == {"one0": True, "gone0": False, "no-such-route": True}
    assert not stub.calls


def test_an_address_that_answers_no_connection_is_given_up_in_time(world: GatewayWorld) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        # A listener whose queue is full answers nobody.
        waiting = [socket.socket() for _ in range(4)]
        try:
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            client = UpstreamClient()
            endpoint = read_endpoint(f"http://127.0.0.1:{port}/v1", (), development=True)
            client.pin(endpoint)
            assert not world.run(client.reach(endpoint, 0.2))
        finally:
            for one in waiting:
                one.close()
