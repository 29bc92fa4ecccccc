"""The JSON of a preview: what settings that are not saved would mean. See ``documents``."""

from __future__ import annotations

from frontend.platform.documents import Document, Time


class IntervalDocument(Document):
    """``note`` says what a change of clocks does to it; ``closes_at`` null: it does not end within a year."""

    opens_at: Time
    closes_at: Time | None
    opens_local: str
    closes_local: str | None
    open_now: bool
    note: str | None


class EtaDocument(Document):
    """When a batch is expected to have ended, in 5 and in 9 of 10 cases; null: not foreseeable."""

    eta_p50: Time | None
    eta_p90: Time | None
    at_risk: bool


class EffectDocument(Document):
    """``now``: as things are; ``then``: under the settings of the preview."""

    batch_id: str
    workspace: str
    model: str
    now: EtaDocument
    then: EtaDocument


class EffectsDocument(Document):
    """Batches that want the route, the earliest end first; ``personal`` counts those of personal workspaces."""

    data: list[EffectDocument]
    left_out: int
    personal: int


class PreviewDocument(Document):
    """What settings would mean. ``always``: there is no window; ``intervals`` is empty then.

    ``live_closed_percent``: of the last week's ``observed_minutes``, how many had as many live calls as the threshold.
    ``effects`` null: that cannot be told now.
    """

    in_words: dict[str, str]
    always: bool
    intervals: list[IntervalDocument]
    live_closed_percent: float | None
    observed_minutes: int
    effects: EffectsDocument | None
