"""Pictures of the dashboards, taken from a scripted life: `python -m ops_tests.pictures`.

Needs Chromium, and the bundle that `npm install && npm run build` makes in dashboards/preview.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ops import queries
from ops.prometheus import Prometheus, now
from ops_tests.life import SLOS, Rules, a_life

IMAGES = queries.ROOT / "docs" / "images"
BUNDLE = queries.ROOT / "dashboards" / "preview" / "dist"
WIDTH = 1600
ROW_HEIGHT, MARGIN = 38, 110
STEP_SECONDS = 2
INTERVAL = "30s"
DEADLINE_SECONDS = 120


def main() -> None:
    """Live once, then draw each dashboard."""
    with TemporaryDirectory(prefix="pictures-") as name:
        started = now()
        with a_life(Path(name), Rules()) as script:
            script.live_until_recovered()
            draw(script.prometheus, started, Path(name))


def draw(scraping: Prometheus, since: float, directory: Path) -> None:
    """A picture of each dashboard, from a Unix time to now; `directory` is for the pages."""
    for name, dashboard in queries.dashboards().items():
        answers = _answers(scraping, dashboard, since)
        page = directory / f"{name}.html"
        page.write_text(_page(dashboard, answers, since))
        _shoot(page, IMAGES / f"{name}.png", _height(dashboard))


def _answers(scraping: Prometheus, dashboard: Mapping[str, Any], since: float) -> dict[str, Any]:
    """What Prometheus says to each query by panel and letter: over the whole life, or now."""
    return {
        panel["id"]: {
            target["refId"]: _answer(scraping, target, since) for target in panel["targets"]
        }
        for panel in queries.panels(dashboard)
    }


def _answer(scraping: Prometheus, target: Mapping[str, Any], since: float) -> list[Any]:
    end = now()
    shown = {**SLOS, "__range": f"{end - since:.0f}s"}
    query = queries.filled(target["expr"], shown, INTERVAL)
    times = {"start": f"{since:.3f}", "end": f"{end:.3f}", "step": str(STEP_SECONDS)}
    if not target.get("instant"):
        return list(scraping.get("query_range", query=query, **times)["result"])
    found = scraping.get("query", query=query, time=times["end"])["result"]
    return [{"metric": one["metric"], "values": [one["value"]]} for one in found]


def _page(dashboard: Mapping[str, Any], answers: Mapping[str, Any], since: float) -> str:
    times = {"from": since, "to": now(), "step": STEP_SECONDS}
    shown = {"dashboard": dashboard, "answers": answers, **times}
    data = json.dumps(shown).replace("</", "<\\/")
    return (
        f'<!doctype html><meta charset="utf-8"><link rel="stylesheet" '
        f'href="{(BUNDLE / "preview.css").as_uri()}"><div id="page"></div>'
        f"<script>window.PREVIEW = {data}</script>"
        f'<script src="{(BUNDLE / "preview.js").as_uri()}"></script>'
    )


def _height(dashboard: Mapping[str, Any]) -> int:
    positions = [panel["gridPos"] for panel in dashboard["panels"]]
    rows: int = max(at["y"] + at["h"] for at in positions)
    return ROW_HEIGHT * rows + MARGIN


def _shoot(page: Path, picture: Path, height: int) -> None:
    picture.parent.mkdir(exist_ok=True)
    subprocess.run(
        [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--allow-file-access-from-files",
            "--virtual-time-budget=8000",
            f"--window-size={WIDTH},{height}",
            f"--screenshot={picture}",
            page.as_uri(),
        ],
        check=True,
        timeout=DEADLINE_SECONDS,
        capture_output=True,
    )


if __name__ == "__main__":
    main()
