"""Progress for people: a bar that redraws itself on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final, TextIO

BAR_CHARS: Final = 24
REDRAW_S: Final = 0.1
PLAIN_EVERY_S: Final = 10.0


class Progress:
    """Shows how far something is; ``end`` leaves the last state on its line."""

    def __init__(self, stream: TextIO | None = None, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bar = self._stream.isatty()
        self._clock_s = clock_s
        self._shown = ""
        self._label = ""
        self._next_s = 0.0
        self._width = 0

    def show(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show ``done`` of ``total`` (0: unknown); a new label or the end is always shown."""
        now_s = self._clock_s()
        over = bool(total) and done >= total
        if label == self._label and not over and now_s < self._next_s:
            return
        self._next_s = now_s + (REDRAW_S if self._bar else PLAIN_EVERY_S)
        self._label = label
        share = min(1.0, done / total) if total else 0.0
        text = f"{label} {done}/{total} ({share:.0%})" if total else label
        if note:
            text += f", {note}"
        if self._bar:
            filled = int(share * BAR_CHARS)
            text = f"[{'#' * filled}{'.' * (BAR_CHARS - filled)}] {text}"
        if text == self._shown:
            return
        self._shown = text
        if self._bar:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave the line, so that what follows has its own; idempotent."""
        if self._bar and self._shown:
            self._stream.write("\n")
            self._stream.flush()
        self._shown = self._label = ""
        self._width = 0
