"""What a run on a device found: checks that hold or not, figures, and what was not run and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One line. ``ok`` is None for a figure and for what was not run."""

    section: str
    what: str
    value: float | None = None
    unit: str = ""
    ok: bool | None = None
    note: str = ""


@dataclass(slots=True)
class Report:
    """Rows in the order they came.

    Args:
        device: its name.
        is_gpu: on a host device figures say nothing and are left out.
        seed: of all random values.
    """

    device: str
    is_gpu: bool
    seed: int
    rows: list[Row] = field(default_factory=list)
    section: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.ok is False]

    def check(self, what: str, ok: bool, note: str = "") -> None:
        self._add(Row(self.section, what, ok=bool(ok), note=note))

    def figure(self, what: str, value: float, unit: str, note: str = "") -> None:
        if self.is_gpu:
            self._add(Row(self.section, what, value, unit, note=note))

    def left_out(self, what: str, why: str) -> None:
        self._add(Row(self.section, what, note=f"not run: {why}"))

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device, "gpu": self.is_gpu, "seed": self.seed, "facts": self.facts,
            "failed": len(self.failed), "rows": [asdict(row) for row in self.rows],
        }  # fmt: skip

    def markdown(self) -> str:
        """Return the rows as a table."""
        lines = ["| section | what | result | note |", "|---|---|---|---|"]
        lines += [f"| {row.section} | {row.what} | {_result(row)} | {row.note} |" for row in self.rows]
        return "\n".join(lines)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"{row.section:<12} {row.what:<58} {_result(row):>14}  {row.note}", flush=True)


def _result(row: Row) -> str:
    if row.ok is not None:
        return "ok" if row.ok else "FAILED"
    return "-" if row.value is None else f"{row.value:.4g} {row.unit}"
