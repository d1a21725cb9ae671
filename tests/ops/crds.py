"""Strict JSON schemas of custom resources, from the definitions of their operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMAS = Path(__file__).parent / "schemas"
OF_THE_CHART = {
    "LeaderWorkerSet": "leaderworkerset.crd.yaml",
    "PodMonitor": "podmonitor.crd.yaml",
    "PrometheusRule": "prometheusrule.crd.yaml",
}
OF_ROUTERS = {
    "EndpointPickerConfig": "endpointpickerconfig.crd.yaml",
    "HTTPRoute": "httproute.crd.yaml",
    "InferencePool": "inferencepool.crd.yaml",
    "LLMInferenceServiceConfig": "llminferenceserviceconfig.crd.yaml",
}
NAMES = {**OF_THE_CHART, **OF_ROUTERS}


def problems(document: dict[str, Any]) -> list[str]:
    """What a custom resource has wrong, unknown fields included."""
    definition = _read(SCHEMAS / NAMES[document["kind"]])
    version = document["apiVersion"].rpartition("/")[2]
    (schema,) = (
        served["schema"]["openAPIV3Schema"]
        for served in definition["spec"]["versions"]
        if served["name"] == version
    )
    return [f"{document['kind']}: {problem}" for problem in _problems(document, schema)]


def problems_of_values(values: dict[str, Any], name: str) -> list[str]:
    """What is wrong in the values for another project's chart; `name` is that of the schema."""
    return _problems(values, _read(SCHEMAS / name))


def _read(path: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return dict(yaml.load(path.read_bytes(), loader))  # noqa: S506 - both are safe


def _problems(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(strict(schema))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


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
