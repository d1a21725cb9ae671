"""The page about dashboards and alerts says what the files do."""

from __future__ import annotations

import os
import re
import subprocess
import sys

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


def test_the_command_that_takes_the_pictures_finds_its_modules() -> None:
    """With the path that the page gives it, from the root of the tree."""
    ((path, module),) = re.findall(r"`PYTHONPATH=(\S+) \S+ -m ([\w.]+)`", PAGE.read_text())
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        cwd=queries.ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
