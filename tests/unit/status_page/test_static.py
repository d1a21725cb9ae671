"""The files of the status page: what they may contain, and what their functions compute."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "server" / "holdfast" / "status_page" / "static"
INDEX = (STATIC / "index.html").read_text(encoding="utf-8")
MODULES = sorted(STATIC.glob("*.js"))
NODE_TESTS = sorted((Path(__file__).parent / "static").glob("*.test.mjs"))
OLDEST_NODE = (20, 19)
"""An older one takes `.js` for CommonJS unless a package.json says otherwise."""


def node_version() -> tuple[int, ...]:
    """The version of Node here, or (0,)."""
    if shutil.which("node") is None:
        return (0,)
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in said.strip().removeprefix("v").split("."))


def test_every_file_that_is_named_exists() -> None:
    """What index.html loads, and what modules import, is there; and nothing else is."""
    loaded = {STATIC / name for name in re.findall(r'"ui/static/([^"]+)"', INDEX)}
    imported = {
        (module.parent / name).resolve()
        for module in MODULES
        for name in re.findall(r'from "([^"]+)"', module.read_text(encoding="utf-8"))
    }
    assert {path for path in loaded | imported if not path.is_file()} == set()
    ours = {path for path in STATIC.glob("*.*") if path.name != "index.html"}
    assert ours - loaded - imported == set()


def test_the_policy_needs_no_exception() -> None:
    """There is no script, style or handler within the page, and nothing is made from text."""
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", INDEX) == []
    banned = (
        r"\beval\(|new Function|innerHTML|outerHTML|insertAdjacentHTML|\"style\"|document\.write"
    )
    for module in MODULES:
        assert re.findall(banned, module.read_text(encoding="utf-8")) == [], module.name


def test_nothing_is_loaded_from_elsewhere() -> None:
    """No file names another host, except in a comment or as the name of a format."""
    for path in [*MODULES, *STATIC.glob("*.css"), STATIC / "index.html"]:
        code = re.sub(
            r"/\*.*?\*/|//[^\n\"]*$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL
        )
        assert re.findall(r"https?://(?!www\.w3\.org/)[^\s\"]+", code) == [], path.name


def test_the_copy_of_uplot_is_the_one_that_was_published() -> None:
    """`vendor/SHA256SUMS.txt` has the digest of each file as its package has it."""
    sums = (STATIC / "vendor" / "SHA256SUMS.txt").read_text()
    listed = {name: digest for digest, name in re.findall(r"^(\w{64})  (\S+)$", sums, re.MULTILINE)}
    here = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (STATIC / "vendor").iterdir()
        if path.name != "SHA256SUMS.txt"
    }
    assert here == listed
    assert {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE.txt"} == set(here)


@pytest.mark.skipif(
    node_version() < OLDEST_NODE, reason=f"there is no Node {'.'.join(map(str, OLDEST_NODE))}"
)
@pytest.mark.parametrize("path", NODE_TESTS, ids=lambda path: path.name)
def test_what_the_modules_compute(path: Path) -> None:
    """The tests of `static/*.test.mjs` pass in Node."""
    done = subprocess.run(
        ["node", "--test", path], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
