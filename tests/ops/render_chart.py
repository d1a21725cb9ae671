"""Renders a chart with real Helm, and checks what Kubernetes itself knows; run by charts.py.

It runs in the environment of `make ops-tools`, which has Helm as a library (244 MB), so it imports
nothing of the server. Standard input: {"chart": path, "cases": {name: values}, "releases": [name],
"several nodes": name of a case, "upgrades": {name of a case: replicas}, "pods": {name: document}}.
Standard output: for each case its documents and errors, those of the first case and of the one of
several nodes for each release, those of an upgrade of what has this number of replicas in the
cluster, and what is wrong with each pod.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint
from helm_python.config import Config
from helm_python.errors import HelmError

from ops.fake_cluster import cluster

NAMESPACE = "inference"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""Of Kubernetes: the oldest that the chart takes, and the newest."""


def rendered(
    chart: Chart, values: dict[str, Any], name: str = "demo", config: Config | None = None
) -> dict[str, Any]:
    """The documents of one case, or why there are none, and what is wrong with them."""
    render = chart.render if config is None else partial(config.render, chart, is_upgrade=True)
    try:
        chart.validate_schema(values)
        files = render(values, name=name, namespace=NAMESPACE)
    except HelmError as error:
        return {"error": str(error), "documents": [], "problems": [], "notes": ""}
    documents = [
        document
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
        if document
    ]
    notes = "".join(text for path, text in files.items() if path.endswith("NOTES.txt"))
    problems = [
        wrong(part, version)
        for document in documents
        for part in (document, *pods_of_group(document))
        for version in VERSIONS
    ]
    return {
        "error": "",
        "documents": documents,
        "problems": [*filter(None, problems)],
        "notes": notes,
    }


def pods_of_group(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of a LeaderWorkerSet, as pods."""
    templates = (document.get("spec") or {}).get("leaderWorkerTemplate", {})
    return [
        {"apiVersion": "v1", "kind": "Pod", **templates[name]}
        for name in ("leaderTemplate", "workerTemplate")
        if name in templates
    ]


def wrong(document: dict[str, Any], version: str) -> str:
    """What a built-in kind has wrong, unknown fields included; empty for a custom kind."""
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return ""
    except kubernetes_validate.ValidationError as error:
        return f"{document['kind']} of {version}: {error.message}"
    return ""


def upgraded(chart: Chart, values: dict[str, Any], replicas: int) -> dict[str, Any]:
    """One case in a cluster that has its objects already, with this number of replicas."""
    with cluster(replicas) as url:
        server = {"name": "only", "cluster": {"server": url}}
        context = {"name": "only", "context": {"cluster": "only", "user": ""}}
        document = {"clusters": [server], "contexts": [context], "current-context": "only"}
        content = json.dumps({"apiVersion": "v1", "kind": "Config", **document})
        with Config(kubeconfig_content=content, namespace=NAMESPACE) as config:
            return rendered(chart, values, config=config)


def dependency(path: str, values: dict[str, Any]) -> dict[str, Any]:
    """One case of the chart as the only dependency of another chart, which has a value for all."""
    with tempfile.TemporaryDirectory() as directory:
        parent = Path(directory)
        shutil.copytree(path, parent / "charts" / "holdfast")
        condition = {"name": "holdfast", "version": "0.x.x", "condition": "holdfast.enabled"}
        description = {"apiVersion": "v2", "name": "parent", "version": "0.1.0"}
        (parent / "Chart.yaml").write_text(
            yaml.safe_dump({**description, "dependencies": [condition]})
        )
        (parent / "templates").mkdir()
        chart = Chart.load(directory)
    given = {"enabled": True, **values}
    return rendered(chart, {"global": {"registry": "registry.example"}, "holdfast": given})


def packaged(chart: Chart) -> list[str]:
    """The files that a package of the chart has beside its templates, once it is unpacked again."""
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(chart.save(directory)).read_bytes()
    return sorted(one["name"] for one in Chart.load_archive(archive).files)


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    chart = Chart.load(request["chart"])
    first = next(iter(request["cases"].values()))
    several = request["cases"][request["several nodes"]]
    json.dump(
        {
            "versions": VERSIONS,
            "releases": {name: rendered(chart, first, name) for name in request["releases"]},
            "groups": {name: rendered(chart, several, name) for name in request["releases"]},
            "packaged": packaged(chart),
            "pods": {
                name: [*filter(None, (wrong(document, version) for version in VERSIONS))]
                for name, document in request["pods"].items()
            },
            "dependency": dependency(request["chart"], first),
            "lint": lint(request["chart"], first, strict=True),
            "upgrades": {
                name: upgraded(chart, request["cases"][name], replicas)
                for name, replicas in request["upgrades"].items()
            },
            "cases": {name: rendered(chart, values) for name, values in request["cases"].items()},
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
