"""The tensors of one request that lie in client shared memory: bound before it starts, written when it has run."""

from __future__ import annotations

from frontend.inference import InferRequest, OutputTensor, Room
from frontend.kserve.checks import require_room
from frontend.kserve.classification import classify
from frontend.kserve.memory_store import ClientMemory
from frontend.kserve.raw_data import raw_part
from frontend.kserve.shapes import refuse_large
from frontend.settings import EndpointSettings


def bind_tensors(request: InferRequest, memory: ClientMemory, limits: EndpointSettings) -> list[Room]:
    """Give every tensor of a request that names a region its ``room``; return them, for the caller to release.

    Inputs count as part of the request's size: a few bytes must not make this server copy any amount of memory.

    Raises:
        NotFound, InvalidInput: see ``ClientMemory.bind``.
        TooLarge: the inputs have more than ``max_request_bytes``.
    """
    bound: list[Room] = []
    input_bytes = 0
    try:
        for given in request.inputs:
            if given.region is not None:
                input_bytes += given.region.size_bytes
                refuse_large(input_bytes, limits)
                given.room = memory.bind(given.region)
                bound.append(given.room)
        for wanted in request.outputs or ():
            if wanted.region is not None:
                wanted.room = memory.bind(wanted.region)
                bound.append(wanted.room)
    except BaseException:
        release_all(bound)
        raise
    return bound


def release_all(bound: list[Room]) -> None:
    """Let go of every range; the list is empty afterwards."""
    while bound:
        bound.pop().release()


def place_output(output: OutputTensor, room: Room) -> OutputTensor:
    """Write an output's wire form into the client's memory; return what is left to tell of it.

    Raises:
        InvalidInput: it does not fit, or the memory is not there any more.
    """
    told = classify(output) if output.classification else output
    raw = raw_part(told)
    require_room(output.name, len(raw), room.size_bytes)
    room.write(raw)
    return OutputTensor(told.name, told.datatype, told.array, placed=True)
