"""Write the dashboards as Grafana imports them: `python -m dashboards`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.frame import dashboard_of
from dashboards.lifecycle import LIFECYCLE
from dashboards.serving import SERVING
from dashboards.workspace import WORKSPACE

PAGES = (WORKSPACE, LIFECYCLE, SERVING)
GENERATED = Path(__file__).parent / "generated"


def rendered() -> Mapping[str, str]:
    """The text of each file, by its name."""
    return {
        f"{page.name}.json": json.dumps(dashboard_of(page), cls=JSONEncoder, indent=2) + "\n"
        for page in PAGES
    }


def main() -> None:
    """Write every file; nothing else is left in the folder."""
    GENERATED.mkdir(exist_ok=True)
    for path in GENERATED.glob("*.json"):
        path.unlink()
    for name, text in rendered().items():
        (GENERATED / name).write_text(text)


if __name__ == "__main__":
    main()
