"""An HTTP request that repeats an earlier one: placed, submitted and answered by a plan (``kserve.repeats``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from engines.errors import Internal, ServingError
from frontend.httpd.exchange import Exchange
from frontend.httpd.wire import Part
from frontend.kserve.http_options import Options
from frontend.kserve.repeats import Plan
from frontend.placed_call import PlacedCall
from worker.channel.client import Placement

if TYPE_CHECKING:
    from frontend.app import FrontendApp

log = logging.getLogger(__name__)

Refuse = Callable[[Exchange, ServingError], None]


class RepeatCall(PlacedCall):
    """One such request: answers its exchange with the outputs, or has ``refuse`` answer with the error."""

    def __init__(
        self, app: FrontendApp, plan: Plan, options: Options, exchange: Exchange, elements: Part, refuse: Refuse
    ) -> None:
        """Place and submit; any failure is the answer."""
        self._plan = plan
        self._options = options
        self._exchange = exchange
        self._refuse = refuse
        exchange.on_disconnect = self.withdraw
        self.start(app, plan.rows, elements, 0, exchange.arrival_ns, options.timeout_ns)

    def answered(self, placement: Placement) -> None:
        exchange = self._exchange
        exchange.on_disconnect = None
        try:
            self._plan.answer(exchange, self._options, placement)
        except ServingError as error:
            placement.release()
            self.refused(error)
        except Exception:
            log.exception("http.answer_failed model=%s", self._plan.rows.entry.name)
            placement.release()
            if not exchange.answered:
                self.refused(Internal("internal error"))

    def refused(self, error: ServingError) -> None:
        self._exchange.on_disconnect = None
        self._refuse(self._exchange, error)
