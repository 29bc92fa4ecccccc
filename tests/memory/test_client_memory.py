"""Registered shared memory: what may be named, what stays within bounds, what a client can take away (rules 1.10)."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import AlreadyExists, InvalidInput, NotFound, ServingError, TooLarge, Unavailable, Unsupported
from frontend.inference import InferRequest, InputTensor, OutputTensor, RegionRange, RequestedOutput
from frontend.kserve import memory_store
from frontend.kserve.client_memory import Region, Table, checked_key, read_range
from frontend.kserve.memory_store import ClientMemory
from frontend.kserve.memory_tensors import bind_tensors, place_output, release_all
from frontend.settings import EndpointSettings, SystemSharedMemorySettings

ON = SystemSharedMemorySettings(enabled=True, key_prefix="pub", max_regions=3, max_bytes=4096)
SECRET = "secret_key_name"


def descriptors() -> set[str]:
    """Return what this process has open, the listing itself apart."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return {line for line in found if "/proc/" not in line}


class Place:
    """A directory of objects, and frontends that share a table."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = root / "shm"
        self.objects.mkdir()
        self._made: list[ClientMemory] = []

    def frontend(self, settings: SystemSharedMemorySettings = ON) -> ClientMemory:
        memory = ClientMemory(settings, str(self.root / "table.json"), str(self.objects))
        self._made.append(memory)
        return memory

    def object(self, name: str = "pub", size_bytes: int = 64) -> Path:
        path = self.objects / name
        path.write_bytes(bytes(index % 251 for index in range(size_bytes)))
        return path

    def close(self) -> None:
        for memory in self._made:
            memory.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    before = descriptors()
    made = Place(tmp_path)
    yield made
    made.close()
    assert descriptors() == before


def register(memory: ClientMemory, name: str = "r", key: str = "/pub", offset: Any = 0, size_bytes: Any = 64) -> None:
    asyncio.run(memory.register(name, key, offset, size_bytes))


def unregister(memory: ClientMemory, name: str = "") -> None:
    asyncio.run(memory.unregister(name))


def read(memory: ClientMemory, offset: int, size_bytes: int, name: str = "r") -> bytes:
    bound = memory.bind(RegionRange(name, offset, size_bytes))
    try:
        found = bytearray(size_bytes)
        bound.read_into(memoryview(found))
        return bytes(found)
    finally:
        bound.release()


@pytest.mark.parametrize("slashes", ["", "/", "//"])
def test_rule_1_10_a_key_is_a_name_behind_any_slashes(place: Place, slashes: str) -> None:
    content = place.object().read_bytes()
    memory = place.frontend()
    register(memory, key=f"{slashes}pub", offset=8, size_bytes=32)
    assert read(memory, 4, 20) == content[12:32]
    assert memory.status("r") == [{"name": "r", "key": "pub", "offset": 8, "byte_size": 32}]


BAD_KEYS: list[tuple[str, str]] = [
    ("", "its key must have"),
    ("///", "its key must have"),
    ("pub/x", "plain name"),
    ("/pub/../x", "plain name"),
    ("..", "plain name"),
    ("pub..x", "plain name"),
    (".", "plain name"),
    ("pub\0x", "plain name"),
    ("p" * 256, "its key must have"),
    (f"other_{SECRET}", "its key is not allowed"),
]


@pytest.mark.parametrize(("key", "text"), BAD_KEYS, ids=[repr(key)[:20] for key, _ in BAD_KEYS])
def test_rule_1_10_other_keys_are_refused(place: Place, key: str, text: str) -> None:
    place.object()
    memory = place.frontend()
    with pytest.raises(InvalidInput, match=text) as caught:
        register(memory, key=key)
    assert SECRET not in str(caught.value)
    assert memory.status() == []


@pytest.mark.parametrize("key", ["ringserve-0123456789abcdef", "sem.lock"])
def test_rule_1_10_what_never_is_a_clients_is_refused_also_without_a_prefix(key: str) -> None:
    with pytest.raises(InvalidInput, match="not allowed"):
        checked_key("r", f"/{key}", SystemSharedMemorySettings(enabled=True))


@given(key=st.text(max_size=12))
def test_rule_1_10_an_accepted_key_is_one_name_in_the_directory(key: str) -> None:
    try:
        name = checked_key("r", key, SystemSharedMemorySettings(enabled=True))
    except InvalidInput:
        return
    assert os.path.normpath(f"/dev/shm/{name}") == f"/dev/shm/{name}"
    assert os.path.dirname(f"/dev/shm/{name}") == "/dev/shm"


def test_rule_1_10_links_pipes_and_folders_are_no_objects(place: Place) -> None:
    outside = place.root / "outside"
    outside.write_bytes(bytes(64))
    (place.objects / "pub_link").symlink_to(outside)
    os.mkfifo(place.objects / "pub_pipe")
    (place.objects / "pub_folder").mkdir()
    memory = place.frontend()
    texts = set()
    for key in ("pub_link", "pub_pipe", "pub_folder", "pub_missing"):
        with pytest.raises(InvalidInput, match="Unable to open shared memory region: 'r'") as caught:
            register(memory, key=key, size_bytes=1)
        texts.add(str(caught.value))
    # One text: it does not tell what lies there, nor under which key.
    assert len(texts) == 1
    assert "pub" not in texts.pop()


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [(0, 65), (64, 1), (1, 64), (2**64 - 1, 2), (2**64 - 32, 64), (2**200, 1), (0, 2**64)],
)
def test_rule_1_10_a_region_stays_within_its_object(place: Place, offset: int, size_bytes: int) -> None:
    place.object()
    memory = place.frontend()
    with pytest.raises(InvalidInput, match=r"Invalid offset \+ byte size for shared memory region: 'r'"):
        register(memory, offset=offset, size_bytes=size_bytes)


@pytest.mark.parametrize(("offset", "size_bytes"), [(-1, 4), (0, 0), (0, -4), (True, 4), (0, 4.0), ("0", 4)])
def test_rule_1_10_extents_are_whole_numbers(place: Place, offset: object, size_bytes: object) -> None:
    place.object()
    with pytest.raises(InvalidInput, match="must be a whole number"):
        register(place.frontend(), offset=offset, size_bytes=size_bytes)


@given(offset=st.integers(0, 2**70), size_bytes=st.integers(0, 2**70))
def test_rule_1_10_a_range_stays_within_its_region(
    tmp_path_factory: pytest.TempPathFactory, offset: int, size_bytes: int
) -> None:
    place = Place(tmp_path_factory.mktemp("range"))
    place.object()
    memory = place.frontend()
    register(memory, offset=16, size_bytes=32)
    try:
        bound = memory.bind(RegionRange("r", offset, size_bytes))
    except InvalidInput:
        assert offset + size_bytes > 32
    else:
        assert offset + size_bytes <= 32
        bound.release()
    place.close()


def test_rule_1_10_names_and_bytes_are_limited(place: Place) -> None:
    place.object(size_bytes=8192)
    memory = place.frontend()
    register(memory, "a", size_bytes=2048)
    with pytest.raises(TooLarge, match=r"system_shared_memory\.max_bytes is 4096"):
        register(memory, "b", size_bytes=2049)
    register(memory, "b", size_bytes=1)
    with pytest.raises(AlreadyExists, match="shared memory region 'b' already in manager"):
        register(memory, "b", size_bytes=1)
    register(memory, "c", size_bytes=1)
    with pytest.raises(TooLarge, match=r"system_shared_memory\.max_regions"):
        register(memory, "d", size_bytes=1)
    unregister(memory, "a")
    register(memory, "d", size_bytes=2049)
    for name in ("", "n" * 1025):
        with pytest.raises(InvalidInput, match="name must have"):
            register(memory, name, size_bytes=1)


def test_every_frontend_knows_what_one_was_told(place: Place) -> None:
    content = place.object().read_bytes()
    one, two, late = place.frontend(), place.frontend(), place.frontend()
    assert two.status() == []
    register(one)
    assert read(two, 0, 64) == content
    unregister(two, "r")
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        read(one, 0, 1)
    register(two)
    register(two, "s")
    one.close()
    assert [region["name"] for region in place.frontend().status()] == ["r", "s"]
    unregister(late)
    assert two.status() == []
    # What is not there is unregistered already.
    unregister(late)
    unregister(late, "r")


def test_a_name_registered_anew_is_the_new_object(place: Place) -> None:
    place.object("pub_a").write_bytes(b"a" * 64)
    place.object("pub_b").write_bytes(b"b" * 64)
    one, two = place.frontend(), place.frontend()
    register(one, key="pub_a")
    assert read(two, 0, 1) == b"a"
    unregister(one, "r")
    register(one, key="pub_b")
    assert read(two, 0, 1) == b"b"


def test_changes_at_once_are_all_kept(place: Place) -> None:
    place.object()
    settings = SystemSharedMemorySettings(enabled=True, max_regions=64)
    frontends = [place.frontend(settings) for _ in range(4)]

    async def all_at_once() -> None:
        await asyncio.gather(
            *(
                memory.register(f"{index}_{at}", "pub", 0, 1)
                for index, memory in enumerate(frontends)
                for at in range(8)
            )
        )

    asyncio.run(all_at_once())
    assert len(frontends[0].status()) == 32


def test_a_table_in_use_is_told_and_not_waited_for_for_ever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.object()
    memory = place.frontend()
    monkeypatch.setattr(memory_store, "LOCK_TIMEOUT_S", 0.02)
    holder = os.open(place.root / "table.json.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(Unavailable, match="is in use"):
        register(memory)
    os.close(holder)
    register(memory)
    assert len(memory.status()) == 1


def test_sm_01_unregistering_spares_requests_under_way(place: Place) -> None:
    content = place.object().read_bytes()
    memory = place.frontend()
    register(memory)
    bound = memory.bind(RegionRange("r", 0, 64))
    unregister(memory)
    with pytest.raises(NotFound):
        memory.bind(RegionRange("r", 0, 64))
    (place.objects / "pub").unlink()
    found = bytearray(64)
    bound.read_into(memoryview(found))
    assert bytes(found) == content
    bound.write(b"later")
    bound.release()


def test_sm_01_a_truncated_object_fails_its_requests_only(place: Place) -> None:
    path = place.object()
    memory = place.frontend()
    register(memory)
    bound = memory.bind(RegionRange("r", 0, 64))
    os.truncate(path, 32)
    for attempt in (lambda: bound.read_into(memoryview(bytearray(64))), lambda: bound.write(bytes(33))):
        with pytest.raises(InvalidInput, match="'r' was made smaller"):
            attempt()
    assert path.stat().st_size == 32
    with pytest.raises(InvalidInput, match="'r' was made smaller"):
        memory.bind(RegionRange("r", 0, 4))
    bound.release()
    os.truncate(path, 64)
    assert read(memory, 0, 4) == bytes([0, 1, 2, 3])


def test_sm_01_truncating_while_reading_never_kills(place: Place) -> None:
    size_bytes = 1 << 20
    path = place.object(size_bytes=size_bytes)
    memory = place.frontend(SystemSharedMemorySettings(enabled=True))
    register(memory, size_bytes=size_bytes)
    stop = threading.Event()

    def shrink_and_grow() -> None:
        while not stop.is_set():
            os.truncate(path, 0)
            os.truncate(path, size_bytes)

    thread = threading.Thread(target=shrink_and_grow)
    thread.start()
    outcomes = set()
    try:
        for _ in range(300):
            try:
                outcomes.add(len(read(memory, 0, size_bytes)))
            except InvalidInput as error:
                outcomes.add(str(error))
    finally:
        stop.set()
        thread.join()
    assert outcomes <= {size_bytes, "shared memory region 'r' was made smaller after it was registered"}
    assert outcomes


@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_object_is_refused_alike_by_all(place: Place, replaced: bool) -> None:
    path = place.object()
    one, two = place.frontend(), place.frontend()
    register(one)
    assert read(one, 0, 1) == b"\0"
    path.rename(path.with_name("kept"))
    path.with_name("kept").unlink()
    if replaced:
        place.object()
    for memory in (one, two):
        with pytest.raises(NotFound, match="'r' is gone: its object was removed"):
            read(memory, 0, 1)


def test_rule_1_10_off_by_default(place: Place) -> None:
    place.object()
    memory = place.frontend(SystemSharedMemorySettings())
    with pytest.raises(Unsupported, match=r"global\.endpoints\.system_shared_memory\.enabled is false"):
        register(memory)
    unregister(memory)
    assert memory.status() == []
    assert sorted(path.name for path in place.root.iterdir()) == ["shm"]
    with pytest.raises(Unsupported, match=r"input 'A': parameter 'shared_memory_region'.*enabled is false"):
        read_range({"shared_memory_region": "r"}, "input 'A'", SystemSharedMemorySettings())


BAD_RANGES: list[tuple[dict[str, Any], str]] = [
    ({"shared_memory_byte_size": 4}, "'shared_memory_region' must be the name"),
    ({"shared_memory_region": "", "shared_memory_byte_size": 4}, "'shared_memory_region' must be the name"),
    ({"shared_memory_region": 3, "shared_memory_byte_size": 4}, "'shared_memory_region' must be the name"),
    ({"shared_memory_region": "r"}, "'shared_memory_byte_size' must be a whole number of bytes, got nothing"),
    ({"shared_memory_region": "r", "shared_memory_byte_size": -1}, "'shared_memory_byte_size' must be"),
    ({"shared_memory_region": "r", "shared_memory_byte_size": True}, "'shared_memory_byte_size' must be"),
    ({"shared_memory_region": "r", "shared_memory_byte_size": 4.0}, "'shared_memory_byte_size' must be"),
    (
        {"shared_memory_region": "r", "shared_memory_byte_size": 4, "shared_memory_offset": "1"},
        "'shared_memory_offset'",
    ),
]


@pytest.mark.parametrize(("parameters", "text"), BAD_RANGES)
def test_parameters_that_say_no_place_are_refused(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=f"input 'A': parameter {text}"):
        read_range(parameters, "input 'A'", ON)


def test_parameters_say_where_a_tensor_lies() -> None:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 4, "other": 1}
    assert read_range(parameters, "input 'A'", ON) == RegionRange("r", 0, 4)
    assert read_range({**parameters, "shared_memory_offset": 2**64}, "", ON) == RegionRange("r", 2**64, 4)
    assert read_range({"binary_data_size": 4}, "input 'A'", SystemSharedMemorySettings()) is None


def test_a_request_binds_all_its_tensors_or_none(place: Place) -> None:
    place.object()
    memory = place.frontend()
    register(memory)
    limits = EndpointSettings(max_request_bytes=1024, system_shared_memory=ON)

    def request(*regions: RegionRange, output: RegionRange | None = None) -> InferRequest:
        inputs = [InputTensor(str(index), "UINT8", (4,), region=region) for index, region in enumerate(regions)]
        return InferRequest("m", "", "", inputs, [RequestedOutput("y", region=output), RequestedOutput("z")])

    good = RegionRange("r", 0, 4)
    bound = bind_tensors(request(good, good, output=good), memory, limits)
    assert len(bound) == 3
    release_all(bound)
    assert bound == []
    wrong: list[tuple[InferRequest, type[ServingError]]] = [
        (request(good, RegionRange("x", 0, 4)), NotFound),
        (request(good, output=RegionRange("r", 61, 4)), InvalidInput),
        (request(RegionRange("r", 0, 600), RegionRange("r", 0, 600)), ServingError),
    ]
    for each, kind in wrong:
        with pytest.raises(kind):
            bind_tensors(each, memory, limits)
    with pytest.raises(TooLarge, match="max_request_bytes is 1024"):
        bind_tensors(request(RegionRange("r", 0, 1025)), memory, limits)


def test_outputs_are_written_in_wire_form_and_never_beyond_their_room(place: Place) -> None:
    path = place.object(size_bytes=64)
    path.write_bytes(bytes(64))
    memory = place.frontend()
    register(memory)
    bound = memory.bind(RegionRange("r", 8, 16))
    told = place_output(OutputTensor("y", "FP32", np.arange(4, dtype=np.float32)), bound)
    assert (told.placed, told.datatype, told.array.shape) == (True, "FP32", (4,))
    assert path.read_bytes() == bytes(8) + np.arange(4, dtype=np.float32).tobytes() + bytes(40)
    with pytest.raises(InvalidInput, match=r"output 'y' \(16 bytes\) should be at least 20 bytes"):
        place_output(OutputTensor("y", "FP32", np.zeros(5, np.float32)), bound)
    text = np.array([b"ab", b""], dtype=object)
    place_output(OutputTensor("t", "BYTES", text), bound)
    assert path.read_bytes()[8:18] == b"\2\0\0\0ab\0\0\0\0"
    classes = place_output(OutputTensor("c", "FP32", np.array([1, 9], np.float32), classification=1), bound)
    assert (classes.datatype, classes.array.shape, classes.classification) == ("BYTES", (1,), 0)
    bound.release()


def test_an_object_that_may_only_be_read_takes_no_outputs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    content = place.object().read_bytes()
    memory = place.frontend()
    opened = os.open

    # Tests may run as root, whom no permission stops.
    def read_only(path: str, flags: int, *more: Any) -> int:
        if flags & os.O_RDWR and path.endswith("/pub"):
            raise PermissionError
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", read_only)
    register(memory)
    assert read(memory, 0, 64) == content
    bound = memory.bind(RegionRange("r", 0, 4))
    with pytest.raises(InvalidInput, match="this server may only read it"):
        bound.write(b"1234")
    bound.release()


TABLE_CHANGES: list[Callable[[Table], Table]] = [
    lambda table: table.registered(Region("x", "k", 0, 1, 1, 1), ON),
    lambda table: table.unregistered("x"),
    lambda table: table.unregistered(""),
]


@given(changes=st.lists(st.sampled_from(TABLE_CHANGES), max_size=12))
def test_a_table_never_names_a_region_twice_and_numbers_grow(changes: list[Callable[[Table], Table]]) -> None:
    table = Table()
    for change in changes:
        before = table
        try:
            table = change(table)
        except AlreadyExists:
            assert before.find("x").name == "x"
            continue
        assert len({region.name for region in table.regions}) == len(table.regions)
        assert table.serial >= before.serial
        assert all(region.serial <= table.serial for region in table.regions)
