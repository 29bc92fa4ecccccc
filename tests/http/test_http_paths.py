"""Which paths name an operation, and which only look like it."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.kserve.http_paths import METHODS, Operation, Place, find

FOUND = {
    "/v2": Place(Operation.SERVER_METADATA),
    "/v2/": Place(Operation.SERVER_METADATA),
    "/v2/health/live": Place(Operation.SERVER_LIVE),
    "/v2/health/ready/": Place(Operation.SERVER_READY),
    "/v2/models/m": Place(Operation.MODEL_METADATA, "m"),
    "/v2/models/m/": Place(Operation.MODEL_METADATA, "m"),
    "/v2/models/m/versions/3": Place(Operation.MODEL_METADATA, "m", "3"),
    "/v2/models/m/ready": Place(Operation.MODEL_READY, "m"),
    "/v2/models/m/versions/3/ready": Place(Operation.MODEL_READY, "m", "3"),
    "/v2/models/m/config": Place(Operation.MODEL_CONFIG, "m"),
    "/v2/models/m/stats": Place(Operation.MODEL_STATISTICS, "m"),
    "/v2/models/m/versions/3/stats": Place(Operation.MODEL_STATISTICS, "m", "3"),
    "/v2/models/stats": Place(Operation.ALL_STATISTICS),
    "/v2/models/stats/infer": Place(Operation.INFER, "stats"),
    "/v2/models/m/infer": Place(Operation.INFER, "m"),
    "/v2/models/m/infer/": Place(Operation.INFER, "m"),
    "/v2/models/m/versions/12/infer": Place(Operation.INFER, "m", "12"),
    "/v2/models/versions/versions/1/infer": Place(Operation.INFER, "versions", "1"),
    "/v2/models/caf%C3%A9%20au%2Flait/infer": Place(Operation.INFER, "café au/lait"),
    "/v2/models/m/generate": Place(Operation.GENERATE, "m"),
    "/v2/repository/index": Place(Operation.INDEX),
    "/v2/repository/r/index": Place(Operation.NAMED_INDEX, "r"),
    "/v2/repository/models/m/load": Place(Operation.LOAD, "m"),
    "/v2/repository/r/models/m/unload": Place(Operation.UNLOAD, "m"),
    "/v2/systemsharedmemory/status": Place(Operation.MEMORY_STATUS),
    "/v2/systemsharedmemory/region/r/register": Place(Operation.MEMORY_REGISTER, "r"),
    "/v2/systemsharedmemory/unregister": Place(Operation.MEMORY_UNREGISTER),
    "/v2/cudasharedmemory/region/r/status": Place(Operation.CUDA_STATUS, "r"),
    "/v2/cudasharedmemory/region/r/register": Place(Operation.CUDA_REGISTER, "r"),
    "/v2/cudasharedmemory/unregister": Place(Operation.CUDA_UNREGISTER),
    "/v2/cudasharedmemory/region/r/unregister": Place(Operation.CUDA_UNREGISTER, "r"),
    "/v2/trace/setting": Place(Operation.TRACE),
    "/v2/models/m/trace/setting": Place(Operation.TRACE, "m"),
    "/v2/logging": Place(Operation.LOGGING),
}
NOTHING = [
    "", "/", "v2", "*", "/v1/models/m", "/V2/models/m", "/v2/Models/m/infer", "/v2/models/m/INFER",
    "//v2/models/m/infer", "/v2//models/m/infer", "/v2/models//infer", "/v2/models/m//infer", "/v2/models/m/infer//",
    "/v2%2Fmodels%2Fm%2Finfer", "/v2/models%2Fm/infer", "/v2/models/m%2Finfer/x", "/v2/models/m/inf%65r",
    "/v2/./models/m/infer", "/v2/models/../infer", "/v2/models/%2e%2e/infer", "/v2/models/./infer",
    "/v2/models/m/infer.", "/v2/models/m/versions//infer", "/v2/models/m/versions/x/infer",
    "/v2/models/m/versions/-1/infer", "/v2/models/m/versions/1%30/infer", "/v2/models/m/versions",
    "/v2/models/%FF/infer", "/v2/models/", "/v2/models", "/v2/health", "/v2/health/live/x", "/v2/repository//index",
    "/v2/repository//models/m/load", "/v2/repository/models//load", "/v2/systemsharedmemory/register",
    "/v2/systemsharedmemory/region//register", "/v2/models/m/trace", "/metrics",
]  # fmt: skip


@pytest.mark.parametrize("path", FOUND)
def test_paths_that_name_something(path: str) -> None:
    assert find(path.encode()) == FOUND[path]


@pytest.mark.parametrize("path", NOTHING)
def test_odd_paths_match_nothing_by_accident_st_08(path: str) -> None:
    assert find(path.encode()) is None


def test_every_operation_has_methods_and_a_path() -> None:
    assert set(METHODS) == set(Operation) == {place.operation for place in FOUND.values()}


@given(st.text(alphabet="/v2modelsinfrready%.F0", max_size=40))
def test_any_path_names_one_thing_or_nothing(path: str) -> None:
    place = find(path.encode())
    assert place is None or (place.name not in (".", "..") and "//" not in path)


@given(st.text(min_size=1, max_size=20).filter(lambda name: name not in (".", "..") and "\ud800" > name < "\udfff"))
def test_any_name_survives_percent_encoding(name: str) -> None:
    assert find(f"/v2/models/{quote(name, safe='')}/infer".encode()) == Place(Operation.INFER, name)
