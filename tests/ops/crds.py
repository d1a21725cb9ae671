"""Strict JSON schemas of custom resources, from the definitions of the Prometheus operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMAS = Path(__file__).parent / "schemas"
NAMES = {"PodMonitor": "podmonitor.crd.yaml", "PrometheusRule": "prometheusrule.crd.yaml"}


def problems(document: dict[str, Any]) -> list[str]:
    """What a custom resource has wrong, unknown fields included."""
    definition = yaml.safe_load((SCHEMAS / NAMES[document["kind"]]).read_text())
    version = document["apiVersion"].rpartition("/")[2]
    (schema,) = (
        served["schema"]["openAPIV3Schema"]
        for served in definition["spec"]["versions"]
        if served["name"] == version
    )
    validator = jsonschema.Draft202012Validator(strict(schema))
    return [
        f"{document['kind']}: {error.json_path}: {error.message}"
        for error in validator.iter_errors(document)
    ]


def strict(schema: dict[str, Any], *, is_metadata: bool = False) -> dict[str, Any]:
    """The schema as JSON Schema, with no field allowed that it does not name."""
    result = dict(schema)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if properties := schema.get("properties"):
        result["properties"] = {
            name: strict(part, is_metadata=name == "metadata") for name, part in properties.items()
        }
        is_open = schema.get("x-kubernetes-preserve-unknown-fields") or is_metadata
        result["additionalProperties"] = bool(is_open)
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(schema["additionalProperties"])
    if items := schema.get("items"):
        result["items"] = strict(items)
    return result
