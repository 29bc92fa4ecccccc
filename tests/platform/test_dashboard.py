"""The Grafana dashboard by itself; ``test_platform_node`` holds its series against a real scrape.

It was read by Grafana's own types (grafana-foundation-sdk 10.1) and came back unchanged, and every expression parses as
PromQL (promql-parser 0.12). What those would find is repeated here as far as it goes without them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "scripts" / "grafana" / "batches.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRID_COLUMNS = 24
BUILT_IN = {"__rate_interval", "__interval", "__range"}


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    at = panel["gridPos"]
    return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}


def test_panels_have_ids_of_their_own_and_do_not_cover_each_other() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = cells(panel)
        assert max(x for x, _ in place) < GRID_COLUMNS, panel["title"]
        assert not place & taken, f"{panel['title']} covers another panel"
        taken |= place


@pytest.mark.parametrize(
    "panel", [panel for panel in PANELS if panel["type"] != "row"], ids=lambda panel: panel["title"]
)
def test_a_panel_says_what_it_shows_and_asks_by_the_variables_that_there_are(panel: dict[str, Any]) -> None:
    assert panel["title"] and panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["fieldConfig"]["defaults"]["unit"]
    references = [target["refId"] for target in panel["targets"]]
    assert references and len(set(references)) == len(references)
    known = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | BUILT_IN
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"] and target["legendFormat"]
        assert set(re.findall(r"\$(\w+)", target["expr"])) <= known
        # Every series is narrowed to the nodes that were chosen.
        series = re.findall(r"\b(?:gateway|ringserve|frontend|worker)_\w+(\{[^}]*\})?", target["expr"])
        assert series and all('instance=~"$instance"' in one for one in series), target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")
