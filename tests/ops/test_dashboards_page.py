"""The page about dashboards and alerts says what the files do."""

from __future__ import annotations

import re

import yaml

from ops import queries
from ops.prometheus import RULES

PAGE = queries.ROOT / "docs" / "dashboards.md"
ROW = re.compile(r"^\| \[`(\w+)`\]\(\S+\) \| (\w+) \| ([\w ]+) \| (.+) \|$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s#]+)\)")


def test_the_table_of_alerts_is_that_of_the_rules() -> None:
    """Every alert has its row, with severity, time and summary."""
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert ROW.findall(PAGE.read_text()) == [
        (
            rule["alert"],
            rule["labels"]["severity"],
            rule.get("for", "at once"),
            rule["annotations"]["summary"],
        )
        for rule in rules
    ]


def test_every_link_of_page_and_runbooks_resolves() -> None:
    """Each names a file that is there; the pictures too."""
    pages = [PAGE, *(queries.ROOT / "deploy" / "runbooks").glob("*.md")]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text())]
    assert len(links) > len(pages)
    for page, link in links:
        assert (page.parent / link).exists(), f"{page.name}: {link}"
