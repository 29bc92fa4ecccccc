"""Rows come back to the caller that sent them, whatever they shared an execution with."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from bench.load import binary_infer, connect
from real_node import raw_output

pytestmark = pytest.mark.process


async def infer(connection, model: str, array: np.ndarray) -> tuple[int, bytes]:
    return await connection.call(binary_infer(model, {"INPUT": ("FP32", array)}))


def rows_of(status_and_body: tuple[int, bytes], columns: int) -> np.ndarray:
    status, body = status_and_body
    assert status == 200, body
    return raw_output(body, columns)


def test_64_clients_with_1_to_7_rows_get_exactly_their_own(ports: dict[str, int]) -> None:
    async def client(number: int) -> int:
        draw = np.random.default_rng(number)
        connection = await connect("127.0.0.1", ports["http_port"])
        done = 0
        for _ in range(25):
            rows = int(draw.integers(1, 8))
            array = draw.integers(-1000, 1000, (rows, 4)).astype(np.float32)
            np.testing.assert_array_equal(rows_of(await infer(connection, "affine", array), 4), array * 2 + 1)
            done += 1
        connection.transport.close()
        return done

    async def run() -> None:
        assert sum(await asyncio.gather(*(client(number) for number in range(64)))) == 64 * 25

    asyncio.run(run())


def test_coalesced_rows_equal_single_request_results(ports: dict[str, int]) -> None:
    draw = np.random.default_rng(5)
    arrays = [draw.standard_normal((int(draw.integers(1, 8)), 64)).astype(np.float32) for _ in range(64)]

    async def run() -> None:
        lone = await connect("127.0.0.1", ports["http_port"])
        alone = [rows_of(await infer(lone, "mlp", array), 64) for array in arrays]
        connections = [await connect("127.0.0.1", ports["http_port"]) for _ in arrays]
        for _ in range(5):
            answers = await asyncio.gather(
                *(infer(connection, "mlp", array) for connection, array in zip(connections, arrays, strict=True))
            )
            for answer, expected in zip(answers, alone, strict=True):
                # Kernels for other row counts sum in another order: equal within float32 rounding, not bit for bit.
                np.testing.assert_allclose(rows_of(answer, 64), expected, rtol=1e-4, atol=1e-5)
        for connection in [lone, *connections]:
            connection.transport.close()

    asyncio.run(run())


@pytest.mark.parametrize("rows", [33, 64, 100])
def test_rule_17_larger_than_every_compiled_size_is_split_and_joined(ports: dict[str, int], rows: int) -> None:
    array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)

    async def run() -> None:
        connection = await connect("127.0.0.1", ports["http_port"])
        np.testing.assert_array_equal(rows_of(await infer(connection, "affine", array), 4), array * 2 + 1)
        connection.transport.close()

    asyncio.run(run())


def test_bs_06_a_row_that_makes_the_model_fail_fails_alone(ports: dict[str, int]) -> None:
    async def run() -> None:
        connections = [await connect("127.0.0.1", ports["http_port"]) for _ in range(16)]
        for round_number in range(10):
            arrays = [np.full((1 + n % 3, 4), float(n), np.float32) for n in range(16)]
            bad = round_number % 16
            arrays[bad][0, 0] = 666.0
            answers = await asyncio.gather(
                *(infer(connection, "poison", array) for connection, array in zip(connections, arrays, strict=True))
            )
            for n, (answer, array) in enumerate(zip(answers, arrays, strict=True)):
                if n == bad:
                    assert answer[0] == 500, answer
                    assert b"poison" in answer[1]
                else:
                    np.testing.assert_array_equal(rows_of(answer, 4), array)
        for connection in connections:
            connection.transport.close()

    asyncio.run(run())
