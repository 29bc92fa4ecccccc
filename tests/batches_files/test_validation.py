"""Batch inputs: every fault by code and physical line, in fixed words; good files become a copy that reads back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.batches.line_contracts import contract_of
from frontend.batches.validation import (
    MAX_FAULTS,
    InvalidBatchInput,
    LineFault,
    ModelAnswer,
    Rules,
    Validator,
)
from frontend.openai.calls import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES

INFER = "/v2/models/small/infer"


def models(endpoint: str, model: str) -> ModelAnswer:
    if model == "embedder-only" and endpoint != EMBEDDINGS:
        return "unsupported"
    return "not_found" if model == "unknown" else "ok"


def rules(endpoint: str = CHAT, **changed: Any) -> Rules:
    contract = contract_of(endpoint)
    assert contract is not None
    return Rules(contract, models, **{"max_lines": 50_000, "max_line_bytes": 4096, **changed})


def chat(custom_id: Any = "a", **changed: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **changed.pop("body", {})}
    body = {key: value for key, value in body.items() if value is not ...}
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changed}
    return {key: value for key, value in line.items() if value is not ...}


def dump(*lines: Any) -> bytes:
    return b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n"


def run(data: bytes, given_rules: Rules | None = None, sizes: tuple[int, ...] = ()) -> tuple[bytes, Validator]:
    validator = Validator(given_rules or rules())
    out = []
    position = 0
    for size in sizes:
        out.append(validator.feed(data[position : position + size]))
        position += size
    out.append(validator.feed(data[position:]))
    out.append(validator.finish())
    return b"".join(out), validator


def faults(data: bytes, given_rules: Rules | None = None, sizes: tuple[int, ...] = ()) -> tuple[LineFault, ...]:
    with pytest.raises(InvalidBatchInput) as caught:
        run(data, given_rules, sizes)
    return caught.value.faults


def codes(data: bytes, given_rules: Rules | None = None) -> list[tuple[int, str]]:
    return [(fault.line, fault.code) for fault in faults(data, given_rules)]


def test_acceptance_24_the_report_names_every_bad_line() -> None:
    secret = "s3cr3t-line-text"
    limited = {"max_tokens": 50}
    data = dump(
        chat("a", body=limited),
        b"{not json " + secret.encode(),
        chat("a", body={**limited, "user": secret}),
        b"   ",
        chat("b", body={**limited, "model": "unknown", "user": secret}),
        chat("c", body={"user": secret}),
        chat("d", body=limited, url=EMBEDDINGS),
        chat("e", body={"max_tokens": 51}),
    )
    report = faults(data, rules(require_max_tokens=True, max_tokens_ceiling=50))
    assert [(fault.line, fault.code) for fault in report] == [
        (2, "invalid_json"),
        (3, "duplicate_custom_id"),
        (5, "model_not_found"),
        (6, "missing_max_tokens"),
        (7, "invalid_url"),
        (8, "max_tokens_too_large"),
    ]
    assert all(secret not in fault.message for fault in report)


@pytest.mark.parametrize("data", [b"\n\n", b"", b" \r\n\t\n", b"\xef\xbb\xbf\n"])
def test_a_file_without_a_request(data: bytes) -> None:
    assert codes(data) == [(1, "empty_file")]


def test_one_line_over_the_maximum_ends_the_scan() -> None:
    lines = [chat(str(number)) for number in range(4)]
    assert run(dump(*lines), rules(max_lines=4))[1].index.lines == 4
    assert codes(dump(*lines, b"", b"{bad", b"{bad"), rules(max_lines=4)) == [(6, "too_many_lines")]


def test_twenty_entries_at_most() -> None:
    report = codes(dump(*[b"{"] * 25))
    assert report == [(line, "invalid_json") for line in range(1, MAX_FAULTS + 1)]


@pytest.mark.parametrize("sizes", [(), (1,) * 90, (4096,), (4097, 3)])
def test_a_line_over_the_maximum_ends_the_scan(sizes: tuple[int, ...]) -> None:
    exact = dump(chat())[:-1]
    exact = exact + b" " * (4096 - len(exact))
    assert run(exact + b"\r\n", sizes=sizes)[1].index.lines == 1
    assert run(b"\xef\xbb\xbf" + exact + b"\r", sizes=sizes)[1].index.lines == 1
    report = faults(exact + b" \n{bad\n", sizes=sizes)
    assert [(fault.line, fault.code) for fault in report] == [(1, "line_too_large")]
    report = faults(b"\n" + b"x" * 10_000_000, sizes=sizes)
    assert [(fault.line, fault.code) for fault in report] == [(2, "line_too_large")]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json"),
        (b"{} {}", "invalid_json"),
        (b'{"custom_id":"\xff"}', "invalid_json"),
        (b'{"custom_id":"a","method":"POST","url":"' + CHAT.encode() + b'","body":{"x":"\xff"}}', "invalid_json"),
        (b'{"custom_id":"a","x":NaN}', "invalid_json"),
        (b'{"custom_id":' + b"[" * 2000 + b"]" * 2000 + b"}", "invalid_json"),
        (b'{"custom_id":"\\ud800","method":"POST","url":"x","body":{}}', "invalid_json"),
        (b'{"a":"\x00"}', "invalid_json"),
        (b"[]", "invalid_line"),
        (b"null", "invalid_line"),
        (b"{}", "invalid_line"),
        (chat(custom_id=...), "invalid_line"),
        (chat(method=...), "invalid_line"),
        (chat(url=...), "invalid_line"),
        ({"custom_id": "a", "method": "POST", "url": CHAT}, "invalid_line"),
        (chat(extra=1), "invalid_line"),
        ({"custom_id": "a", "method": "POST", "url": CHAT, "body": []}, "invalid_line"),
        ({"custom_id": 1, "method": 1, "url": CHAT, "body": "x"}, "invalid_line"),
        (chat(custom_id=7), "invalid_custom_id"),
        (chat(custom_id=None), "invalid_custom_id"),
        (chat(custom_id=""), "invalid_custom_id"),
        (chat(custom_id="é" * 257), "invalid_custom_id"),
        (chat(method="GET"), "invalid_method"),
        (chat(method="post"), "invalid_method"),
        (chat(method=1), "invalid_method"),
        (chat(url="/v1/nope"), "invalid_url"),
        (chat(url=None), "invalid_url"),
        (chat(url="/v1/nope", body={"stream": True}), "invalid_url"),
        (chat(body={"stream": True}), "invalid_body"),
        (chat(body={"stream": "no"}), "invalid_body"),
        (chat(body={"model": ...}), "invalid_body"),
        (chat(body={"model": 3}), "invalid_body"),
        (chat(body={"model": ""}), "invalid_body"),
        (chat(body={"model": "m" * 257}), "invalid_body"),
        (chat(body={"messages": ...}), "invalid_body"),
        (chat(body={"messages": []}), "invalid_body"),
        (chat(body={"messages": "hi"}), "invalid_body"),
        (chat(body={"messages": ["hi"]}), "invalid_body"),
        (chat(body={"max_tokens": 5, "max_completion_tokens": 5}), "invalid_body"),
        (chat(body={"max_tokens": -1}), "invalid_body"),
        (chat(body={"max_tokens": 1.5}), "invalid_body"),
        (chat(body={"max_tokens": "5"}), "invalid_body"),
        (chat(body={"model": "unknown"}), "model_not_found"),
        (chat(body={"model": "embedder-only"}), "model_unsupported"),
    ],
)  # fmt: skip
def test_case_bf_19_one_bad_line_by_code(line: Any, code: str) -> None:
    assert codes(dump(chat("first"), line)) == [(2, code)]


@pytest.mark.parametrize(
    "body",
    [
        {"stream": False},
        {"stream": None, "max_tokens": None, "max_completion_tokens": 5},
        {"max_tokens": 0},
        {"surprise": {"deep": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]}, "priority": -5},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "\u2028\ud83d\ude00"}]}]},
    ],
)
def test_fields_we_do_not_know_pass_untouched(body: dict[str, Any]) -> None:
    line = dump(chat(body=body))
    copy, validator = run(line)
    assert copy.startswith(line)
    assert validator.index.lines == 1


@pytest.mark.parametrize(
    ("endpoint", "good", "bad"),
    [
        (EMBEDDINGS, [{"input": "x"}, {"input": ["x"]}, {"input": [1]}], [{}, {"input": []}, {"input": 3}]),
        (COMPLETIONS, [{"prompt": "x"}, {"prompt": [" x"]}, {"prompt": [[1]]}], [{}, {"prompt": []}, {"prompt": {}}]),
        (RESPONSES, [{"input": "x"}, {"input": [{"role": "user"}]}, {"prompt": {}}], [{"input": []}, {"input": 1}]),
        (INFER, [{"inputs": [{"name": "x"}]}], [{}, {"inputs": []}, {"inputs": [1]}]),
    ],
)  # fmt: skip
def test_contracts_of_the_other_endpoints(endpoint: str, good: list[Any], bad: list[Any]) -> None:
    model = {} if endpoint == INFER else {"model": "m"}

    def lines(bodies: list[Any]) -> bytes:
        return dump(*(
            {"custom_id": str(number), "method": "POST", "url": endpoint, "body": {**model, **body}}
            for number, body in enumerate(bodies)
        ))  # fmt: skip

    _, validator = run(lines(good), rules(endpoint))
    assert validator.index.models == (("small",) if endpoint == INFER else ("m",))
    assert codes(lines(bad), rules(endpoint)) == [(number + 1, "invalid_body") for number in range(len(bad))]


def test_background_responses_are_not_run() -> None:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": RESPONSES,
        "body": {"model": "m", "input": "x", "background": True},
    }
    assert codes(dump(line), rules(RESPONSES)) == [(1, "unsupported_feature")]


def test_endpoints_without_a_contract() -> None:
    for endpoint in ("/v1/messages", "/v1/nope", "", "/v2/models//infer", "/v2/models/a/b/infer", "v1/embeddings"):
        assert contract_of(endpoint) is None


def test_lanes_follow_the_first_appearance_of_their_model() -> None:
    data = dump(chat("1", body={"model": "n"}), chat("2"), b"", chat("3", body={"model": "n"}))
    assert run(data)[1].index.models == ("n", "m")


def test_a_duplicate_of_a_line_with_another_fault_is_reported_too() -> None:
    assert codes(dump(chat("a", method="GET"), chat("a"))) == [(1, "invalid_method"), (2, "duplicate_custom_id")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NEARLY = st.builds(
    lambda line, position, byte: line[:position] + byte + line[position + 1 :],
    st.builds(lambda extra: json.dumps(chat(body=extra), ensure_ascii=False).encode("utf-8", "replace"),
              st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
    st.integers(0, 200),
    st.binary(max_size=2).filter(lambda byte: b"\n" not in byte),
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(line=NEARLY)
def test_what_is_accepted_is_json_to_others_too(line: bytes) -> None:
    try:
        copy, validator = run(line)
    except InvalidBatchInput:
        return
    assert validator.index.lines == 1
    request = json.loads(copy[: copy.index(b"\n")])
    assert set(request) == {"custom_id", "method", "url", "body"}
    assert isinstance(request["body"]["model"], str)


@settings(deadline=None, max_examples=200)
@given(
    lines=st.lists(
        st.sampled_from([b"", b"  ", b"{bad", b"[]", b"x" * 5000])
        | st.builds(lambda n, m: dump(chat(str(n), body={"model": m}))[:-1], st.integers(0, 9), st.sampled_from("mn")),
        max_size=12,
    ),
    ends=st.sampled_from([b"\n", b"\r\n"]),
    closed=st.booleans(),
    bom=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    sizes=st.lists(st.integers(1, 400), max_size=30),
)  # fmt: skip
def test_how_the_file_arrives_changes_nothing(
    lines: list[bytes], ends: bytes, closed: bool, bom: bytes, sizes: list[int]
) -> None:
    data = bom + ends.join(lines) + (ends if closed else b"")

    def outcome(cuts: tuple[int, ...]) -> Any:
        try:
            return run(data, sizes=cuts)[0]
        except InvalidBatchInput as error:
            return error.faults

    assert outcome(tuple(sizes)) == outcome(())
