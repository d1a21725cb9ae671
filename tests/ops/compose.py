"""What Compose and the doctor make of our Compose files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from holdfast.doctor.command import read_deployments
from holdfast.doctor.findings import Finding
from manifests import hazards_of
from ops.prometheus import tool
from ops.queries import ROOT

COMPOSE = ROOT / "deploy" / "compose"
BOUNDED_LOG = {"driver": "json-file", "options": {"max-size": "100m", "max-file": "5"}}


def compose_config(*files: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`docker compose config` of these files together."""
    named = [word for file in files for word in ("-f", str(COMPOSE / file))]
    return subprocess.run(
        [tool("docker-compose"), *named, "config", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment},
    )


def hazards(directory: Path, document: str) -> list[Finding]:
    """What `holdfast doctor --manifest` has against the only server of a document."""
    path = directory / "compose.yaml"
    path.write_text(document)
    (deployment,) = read_deployments([path])
    return hazards_of(deployment)
