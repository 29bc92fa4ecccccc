"""What the other side may do: its settings, checked, and how many useless frames it may send."""

from __future__ import annotations

from typing import Final

from frontend.http2 import frames
from frontend.http2.frames import Code, ConnectionFault
from frontend.http2.limits import Limits

ANSWER_CREDIT: Final = 4
"""PING and WINDOW_UPDATE frames that come with an answer in good order, from a client that measures its line."""


class Budget:
    """Counts frames that cost work and bring none; renewed with time."""

    __slots__ = ("_limits", "idle_left", "resets_left")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.idle_left = limits.idle_frames
        self.resets_left = limits.resets

    def renew(self) -> None:
        """About a second has passed."""
        limits = self._limits
        self.idle_left = min(limits.idle_frames, self.idle_left + limits.idle_frames_per_s)
        self.resets_left = min(limits.resets, self.resets_left + limits.resets_per_s)

    def idle(self, what: str) -> None:
        """Count a frame that does nothing for any request.

        Raises:
            ConnectionFault: there were too many.
        """
        self.idle_left -= 1
        if self.idle_left < 0:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"too many {what}")

    def reset(self) -> None:
        """Count a stream that ended without its answer by the client's doing.

        Raises:
            ConnectionFault: there were too many.
        """
        self.resets_left -= 1
        if self.resets_left < 0:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many streams reset")


def read_settings(payload: bytes) -> dict[int, int]:
    """Return the values of a SETTINGS frame; of a repeated one the last counts.

    Raises:
        ConnectionFault: a value out of its range, or no SETTINGS at all.
    """
    if len(payload) % frames.SETTING.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS must be of 6 bytes each")
    values = dict(frames.SETTING.iter_unpack(payload))
    window = values.get(frames.SETTINGS_INITIAL_WINDOW_SIZE, 0)
    if window > frames.MOST_WINDOW_BYTES:
        raise ConnectionFault(Code.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {window} exceeds 2^31 - 1")
    size = values.get(frames.SETTINGS_MAX_FRAME_SIZE, frames.DEFAULT_FRAME_BYTES)
    if not frames.DEFAULT_FRAME_BYTES <= size <= frames.MOST_FRAME_BYTES:
        raise ConnectionFault(Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {size} is out of range")
    push = values.get(frames.SETTINGS_ENABLE_PUSH, 0)
    if push > 1:
        raise ConnectionFault(Code.PROTOCOL_ERROR, f"ENABLE_PUSH {push} is neither 0 nor 1")
    return values
