"""What settings would change for a batch, as people read it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.store.rows import SECOND_US
from frontend.platform.pages import wording
from frontend.platform.pages.wording import Tone
from frontend.platform.read_models import BatchEffect

UNKNOWN: Final = "not known yet"
NEVER: Final = "not foreseeable"
ALIKE_SHARE: Final = 0.05
"""Forecasts that differ by less than this share of the time that is left are shown as the same."""
ALIKE_S: Final = 120


@dataclass(frozen=True, slots=True)
class EffectText:
    """A batch with its ends in words; ``verdict`` is ``sooner``, ``later``, ``unchanged`` or empty."""

    batch_id: str
    of: str
    now: str
    then: str
    at_risk_now: bool
    at_risk_then: bool
    verdict: str
    tone: Tone


def effect_text(effect: BatchEffect, now_us: int) -> EffectText:
    """Return what would change for a batch."""
    verdict, tone = _verdict(effect.now, effect.then, now_us)
    return EffectText(
        batch_id=effect.batch_id,
        of=f"{effect.public_model} · {effect.workspace_name}",
        now=end_text(effect.now, now_us),
        then=end_text(effect.then, now_us),
        at_risk_now=effect.now.at_risk,
        at_risk_then=effect.then.at_risk,
        verdict=verdict,
        tone=tone,
    )


def end_text(outlook: Outlook, now_us: int) -> str:
    """Return ``in 3 h 20 min (9 of 10: 4 h)``."""
    if not outlook.measured_lines:
        return UNKNOWN
    if outlook.eta_p50 is None:
        return NEVER
    likely = wording.duration(outlook.eta_p50 * SECOND_US - now_us)
    if outlook.eta_p90 is None:
        return f"in {likely} (9 of 10: {NEVER})"
    return f"in {likely} (9 of 10: {wording.duration(outlook.eta_p90 * SECOND_US - now_us)})"


def _verdict(now: Outlook, then: Outlook, now_us: int) -> tuple[str, Tone]:
    if not (now.measured_lines and then.measured_lines):
        return "", "calm"
    if then.eta_p50 is None or now.eta_p50 is None:
        if then.eta_p50 == now.eta_p50:
            return "unchanged", "calm"
        return ("later", "fault") if then.eta_p50 is None else ("sooner", "good")
    difference_s = then.eta_p50 - now.eta_p50
    left_s = now.eta_p50 - now_us // SECOND_US
    if abs(difference_s) <= max(ALIKE_S, ALIKE_SHARE * left_s):
        return "unchanged", "calm"
    length = wording.duration(abs(difference_s) * SECOND_US)
    return (f"{length} sooner", "good") if difference_s < 0 else (f"{length} later", "wait")
