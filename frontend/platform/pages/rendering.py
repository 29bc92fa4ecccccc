"""Templates into bytes: one environment, escaping everything, refusing names that do not exist."""

from __future__ import annotations

from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from frontend.platform import words
from frontend.platform.pages import wording
from frontend.platform.pages.assets import Assets
from frontend.platform.pages.visits import Reply, Visit, link

LIVE_S: Final = 2
"""How often a page asks for its live part while somebody can see it."""
CHART_S: Final = 30
INCIDENTS_S: Final = 10


class Renderer:
    """Renders templates of ``templates/``."""

    def __init__(self, assets: Assets) -> None:
        self._environment = Environment(
            loader=PackageLoader("frontend.platform.pages"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.globals.update(
            asset=lambda file: link("assets", assets.served_name(file)),
            link=link,
            live_seconds=LIVE_S,
            chart_seconds=CHART_S,
            incidents_seconds=INCIDENTS_S,
            batch_state=wording.batch_state,
            route_state=wording.route_state,
            lane_state=wording.lane_state,
            load_text=wording.load_text,
            count=wording.count,
            ago=wording.ago,
            role_names=wording.ROLES,
        )
        self._environment.filters.update(
            number=wording.number,
            moment=wording.moment,
            machine=wording.machine,
            duration=wording.duration,
            percent=wording.share,
            reason=words.reason_text,
        )

    def page(self, template: str, visit: Visit | None, *, http_status: int = 200, **values: Any) -> Reply:
        """Return a whole page; ``visit`` None for somebody who is not signed in."""
        return Reply(self.render(template, visit=visit, **values), http_status)

    def fragment(self, template: str, visit: Visit, **values: Any) -> Reply:
        """Return a part of a page, for the page's own script."""
        return Reply(self.render(template, visit=visit, **values))

    def render(self, template: str, **values: Any) -> bytes:
        return self._environment.get_template(template).render(**values).encode()
