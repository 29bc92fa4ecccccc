"""A request whose tensors go from the socket to where the worker reads them, while they arrive.

All but the elements is known beforehand, so it is checked and placed beforehand, and what is wrong is told before its
bytes are read. If model or worker were replaced meanwhile, the elements are taken along and the request starts anew, as
one that was collected first would start only now.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engines.errors import Internal, ServingError
from frontend.execution import Execution, pieces
from frontend.infer_call import InferCall
from frontend.inference import InferRequest, Promised
from frontend.kserve.checks import Checked, CheckedInput
from frontend.serving import Done

if TYPE_CHECKING:
    from frontend.app import FrontendApp

log = logging.getLogger("frontend.app")


class LateCall(InferCall):
    """One request of a model without hooks, all of whose inputs are ``Promised``.

    It holds its place in the arena from ``expect`` on: until it is answered, its deadline passes or it is cancelled.
    """

    __slots__ = ("_late",)

    def __init__(self, app: FrontendApp, request: InferRequest, arrival_ns: int, done: Done) -> None:
        super().__init__(app, request, arrival_ns, done)
        self._late: Sequence[CheckedInput] = ()

    def expect(self) -> bool:
        """Check and place; any mistake becomes the answer. False: not taken, nothing was answered or counted."""
        app = self._app
        app.traffic.in_flight += 1
        try:
            entry = app.entry(self._request.model, self._request.version)
            if entry.model_py or not self._reserve(self._check()):
                app.traffic.in_flight -= 1
                self._over = True
                return False
        except ServingError as error:
            self._finish(error)
            return True
        except Exception:
            log.exception("request.failed model=%s", self._request.model)
            self._finish(Internal("internal error"))
            return True
        app.deadlines.add(self)
        return True

    def complete(self) -> None:
        """All elements are in their places: have them executed."""
        if self._over:
            return
        try:
            self._go()
        except ServingError as error:
            self._finish(error)
        except Exception:
            log.exception("request.failed model=%s", self._request.model)
            self._finish(Internal("internal error"))

    def _reserve(self, checked: Checked) -> bool:
        app = self._app
        assert self.entry is not None
        if len(pieces(self.entry, checked.rows)) > 1:
            return False
        execution = Execution(app.channel, self.entry, self._on_executed, background=self._request.background)
        rooms = execution.reserve(self._variant(checked.inputs), checked.rows, self.deadline_ns, self.arrival_ns)
        if app.crowded():
            execution.abandon()
            return False
        # From here on whatever ends this request gives the place back.
        self._execution = execution
        self._late = checked.inputs
        for given, room in zip(checked.inputs, rooms, strict=True):
            assert isinstance(given.room, Promised) and room.flags.c_contiguous
            # Through uint8: numpy cannot export a buffer of bfloat16.
            given.room.place = room.reshape(-1).view(np.uint8).data
            assert len(given.room.place) == given.room.size_bytes
        return True

    def _go(self) -> None:
        execution, placed_for = self._execution, self.entry
        assert execution is not None and placed_for is not None
        self._refuse_late()
        entry = self._app.entry(self._request.model, self._request.version)
        if execution.stranded or entry.model_id != placed_for.model_id:
            for given in self._late:
                assert isinstance(given.room, Promised)
                given.room.place = memoryview(bytes(given.room.place))
            self._execution = None
            execution.abandon()
            self._run(self._check())
            return
        for given in self._late:
            assert isinstance(given.room, Promised)
            given.check_values(np.frombuffer(given.room.place, np.uint8))
        execution.submit()
