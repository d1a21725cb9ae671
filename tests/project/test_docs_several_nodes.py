"""The guide of several nodes says what the code says."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from english import literals
from holdfast.follow import LEAVE_SECONDS
from holdfast.nodes.channel import HEARTBEAT_SECONDS, SILENCE_SECONDS
from holdfast.nodes.command_line import read_follow
from holdfast.nodes.head import END_SECONDS
from holdfast.processes.tree import KILL_DEADLINE_SECONDS
from holdfast.records import NodeStatus
from holdfast.settings import ListenSettings, NodeSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "several-nodes.md").read_text()
VARIES = "…"


def section(heading: str) -> str:
    """The text below a heading, up to the next one of its level."""
    _, found, rest = PAGE.partition(f"\n## {heading}\n")
    assert found
    return rest.partition("\n## ")[0]


def blocks(language: str, text: str = PAGE) -> list[str]:
    """Every fenced block of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_every_message_of_ours_is_one_of_the_code() -> None:
    """What the first table of the troubleshooting quotes is what Holdfast says."""
    ours, _, _ = section("Troubleshooting").partition("\nWhat vLLM, NCCL and the kernel say:\n")
    quoted = re.findall(r"^\| `([^`]+)` \|", ours, re.MULTILINE)
    sources = (ROOT / "server" / "holdfast").rglob("*.py")
    said = [text for path in sources for _, text in literals(ast.parse(path.read_text()))]
    assert quoted
    assert [
        message
        for message in quoted
        if not any(message.replace(VARIES, "{}") in text for text in said)
    ] == []


def test_the_example_of_nodes_has_their_fields() -> None:
    """Each node of `/statusz` has what the guide shows of it."""
    (shown,) = map(json.loads, blocks("json"))
    assert [list(node) for node in shown] == [[one.name for one in fields(NodeStatus)]] * 2


def test_the_ports_are_the_defaults() -> None:
    """Those of head and follower are the ones in the table of ports."""
    text = section("Network and trust")
    rows = re.findall(r"^\| (\d+)/tcp \(`(--[a-z-]+)`\) \| (\w+) ", text, re.MULTILINE)
    follower = read_follow(["head", "--node-key-file=key"], {})
    assert rows == [
        (str(NodeSettings().port), "--node-port", "head"),
        (str(ListenSettings().port), "--port", "head"),
        (str(follower.listen.port), "--port", "followers"),
    ]
    assert follower.head_port == NodeSettings().port


def test_the_times_are_those_of_the_heartbeat() -> None:
    """One a second, and five seconds of silence."""
    text = section("When a node is lost")
    assert (HEARTBEAT_SECONDS, SILENCE_SECONDS) == (1.0, 5.0)
    assert "a heartbeat every second" in text
    assert "after 5 s without an answer" in text
    assert f"has stopped | after {SILENCE_SECONDS:g} s;" in text
    words = " ".join(text.split())
    assert f"gives up after {LEAVE_SECONDS:g} s, and exits" in words
    assert f"exits with 143 at most {KILL_DEADLINE_SECONDS:g} s later" in words


def test_the_time_to_end_an_engine_is_that_of_the_head() -> None:
    """After it, the node is lost."""
    assert f"has not done so after {END_SECONDS:g} s is lost" in section("Troubleshooting")


def test_the_scrapes_are_those_of_the_chart() -> None:
    """The jobs and what is kept of followers are the same."""
    (configuration,) = (
        found for found in map(yaml.safe_load, blocks("yaml")) if "scrape_configs" in found
    )
    servers, followers = configuration["scrape_configs"]
    template = (ROOT / "deploy/helm/holdfast/templates/monitoring.yaml").read_text()
    jobs = re.findall(r"\{targetLabel: job, replacement: ([\w-]+)\}", template)
    kept = re.findall(r"\{action: keep, .* regex: (\S+)\}", template)
    given: list[dict[str, Any]] = followers["metric_relabel_configs"]
    assert jobs == [servers["job_name"], followers["job_name"]]
    assert kept == [one["regex"] for one in given]
