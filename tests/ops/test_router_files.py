"""The files for routers that are shipped: routers take them, and they name what the server has."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import parse_serve
from holdfast.doctor.command import read_deployments
from holdfast.doctor.manifest_checks import check_deployment
from holdfast.doctor.parallelism import read_layout
from holdfast.listener.connection_table import DEFAULT_MAX_CONNECTIONS
from holdfast.telemetry.routing import ROUTING_SERIES
from ops import crds, queries
from ops.charts import CHART, ROUTERS, Answer, container, pod_of_kserve, shipped, templates
from ops.prometheus import tool
from ops.queries import ROOT
from proxies import nginx_prefix

PAGE = ROOT / "docs" / "behind-a-router.md"
FILES = sorted(path.relative_to(ROUTERS).as_posix() for path in ROUTERS.rglob("*.*"))
MANIFESTS = (
    "kserve/llm-inference-service-config.yaml",
    "llm-d/endpoint-picker-config.yaml",
    "llm-d/inference-pool.yaml",
)
CHART_VALUES = ("chart-values.yaml", "aibrix/chart-values.yaml", "llm-d/chart-values.yaml")
SCRIPT = "vllm-router.sh"
STACK = "productionstack.values.yaml"
RELEASE = "holdfast"
"""The name that the files give to a release of our chart."""
TIMEOUT_SECONDS = 120
ENVOY_IDLE_SECONDS = 3600
"""How long Envoy keeps an idle connection by default (HttpProtocolOptions.idle_timeout)."""

every_file = pytest.mark.parametrize("name", FILES)


def text(name: str) -> str:
    """The text of a file."""
    return (ROUTERS / name).read_text()


def documents(name: str) -> list[dict[str, Any]]:
    """What a YAML file holds."""
    return list(yaml.safe_load_all(text(name)))


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    """One run of a tool, with standard error in its output."""
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def routes() -> set[str]:
    """Every route of ours that the reference lists; a test compares that with the server."""
    _, _, section = (ROOT / "docs" / "reference.md").read_text().partition("\n## Routes\n")
    return set(re.findall(r"^\| `(/[\w/]+)` \|", section.partition("\n### ")[0], re.MULTILINE))


def picker() -> dict[str, dict[str, Any]]:
    """The plugins of the endpoint picker, by the name that refers to them."""
    (document,) = documents("llm-d/endpoint-picker-config.yaml")
    return {plugin.get("name", plugin["type"]): plugin for plugin in document["plugins"]}


def flag_value(arguments: list[str], name: str) -> str:
    """The value of a flag that stands as one word."""
    (found,) = (one.partition("=")[2] for one in arguments if one.startswith(f"{name}="))
    return found


@every_file
def test_the_file_says_what_it_is_for(name: str) -> None:
    """Before anything else."""
    first = next(line for line in text(name).splitlines() if not line.startswith("#!"))
    assert re.match(r"# \S+", first)


@every_file
def test_the_guide_links_the_file(name: str) -> None:
    """So that it is found."""
    assert f"(../deploy/routers/{name})" in PAGE.read_text()


@every_file
def test_every_metric_that_is_named_exists(name: str) -> None:
    """In our table, on the page for routers, or in vLLM's source."""
    named = set(re.findall(r"\b(?:holdfast_[a-z_]+|vllm:[a-z_]+)", text(name)))
    of_routers = {series.name for series in ROUTING_SERIES}
    assert named <= queries.our_names() | queries.vllm_names() | of_routers


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifest_is_valid(name: str) -> None:
    """No unknown field, no wrong type and nothing missing."""
    found = documents(name)
    assert found
    assert [problem for one in found for problem in crds.problems(one)] == []


def test_a_wrong_manifest_is_found() -> None:
    """An unknown field of a plugin, which the endpoint picker would refuse."""
    (document,) = documents("llm-d/endpoint-picker-config.yaml")
    document["plugins"][0]["parameters"]["route"] = "/metrics"
    assert len(crds.problems(document)) == 1


def test_production_stack_knows_every_value() -> None:
    """None has a name or type that its chart lacks, and each flag is one of its router."""
    (values,) = documents("production-stack/values.yaml")
    assert crds.problems_of_values(values, STACK) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("routingLogik", "prefixaware"), ("routingLogic", "prefix_aware"), ("extraArgs", ["--port"])],
)
def test_a_wrong_value_for_production_stack_is_found(name: str, value: object) -> None:
    """A name, a choice and a flag that there are not."""
    (values,) = documents("production-stack/values.yaml")
    values["routerSpec"][name] = value
    assert len(crds.problems_of_values(values, STACK)) == 1


@pytest.mark.tools
def test_keda_knows_every_field() -> None:
    """Models made of its own definition take the object, and give it back as it was."""
    (document,) = documents("keda/scaled-object.yaml")
    program = (
        "import json, sys\n"
        "from cloudcoil.models.keda.v1alpha1 import ScaledObject\n"
        "given = json.load(sys.stdin)\n"
        "taken = ScaledObject.model_validate(given)\n"
        "json.dump(taken.model_dump(mode='json', by_alias=True, exclude_unset=True), sys.stdout)\n"
    )
    done = subprocess.run(
        [tool("routers-python"), "-c", program],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == document


def test_keda_asks_for_what_waits() -> None:
    """By the metric that the chart's autoscaler reads, narrowed by labels that there are."""
    (document,) = documents("keda/scaled-object.yaml")
    (trigger,) = document["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert queries.metric_names(query) == [values["autoscaling"]["metric"], "holdfast_ready"]
    of_pods = [f"{values['autoscaling']['metric']}{{{label}}}" for label in ("namespace", "pod")]
    assert queries.unknown_labels(query) == of_pods
    assert f'pod=~"{RELEASE}-.+"' in query
    assert trigger["metadata"]["threshold"] == str(values["autoscaling"]["waitingPerReplica"])


def test_the_pod_of_kserve_may_write_its_state() -> None:
    """Its claim gets the group of the image's user, as the volumes of the chart do."""
    of_chart = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    ours = pod_of_kserve()["spec"]["securityContext"]
    assert ours["fsGroup"] == of_chart["runAsUser"]
    assert ours.items() <= of_chart.items()


@pytest.mark.tools
def test_kubernetes_accepts_the_pod_of_kserve(answer: Answer) -> None:
    """No unknown field and no wrong type in the template."""
    assert answer["pods"]["KServe"] == []


def test_the_doctor_is_content_with_the_pod_of_kserve(tmp_path: Path) -> None:
    """Its flags, probes, grace and volumes are right."""
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(pod_of_kserve()))
    (deployment,) = read_deployments([path])
    settings = parse_serve(deployment.arguments, {}, needs_model=False)
    findings = check_deployment(deployment, read_layout(deployment.arguments), settings)
    assert [one for one in findings if one.severity != "ok"] == []


@pytest.mark.tools
def test_envoy_accepts_its_configuration() -> None:
    """It would start with it."""
    done = ran(tool("envoy"), "--mode", "validate", "-c", str(ROUTERS / "envoy.yaml"))
    assert done.returncode == 0, done.stdout


def test_proxies_take_what_a_replica_takes() -> None:
    """Bodies as large, and as many requests at once."""
    most_bytes = parse_serve(["m"], {}).limits.max_body_bytes
    assert f"client_max_body_size {most_bytes >> 20}m;" in text("nginx.conf")
    (envoy,) = documents("envoy.yaml")
    (listener,) = envoy["static_resources"]["listeners"]
    assert listener["per_connection_buffer_limit_bytes"] == most_bytes
    (cluster,) = envoy["static_resources"]["clusters"]
    (thresholds,) = cluster["circuit_breakers"]["thresholds"]
    assert set(thresholds.values()) == {DEFAULT_MAX_CONNECTIONS}


def test_litellm_takes_a_replica_out_for_seconds() -> None:
    """It looks at `Retry-After` before the setting of its router, but not before a replica's."""
    (configuration,) = documents("litellm.yaml")
    assert "cooldown_time" not in configuration["router_settings"]
    found = {entry["litellm_params"]["cooldown_time"] for entry in configuration["model_list"]}
    assert found == {5}


def test_vllm_router_waits_for_a_start() -> None:
    """As long as the chart lets a pod start: by default it ends after ten minutes."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    (seconds,) = re.findall(r"--worker-startup-timeout-secs (\d+)", text(SCRIPT))
    assert int(seconds) >= values["start"]["seconds"]


@pytest.mark.tools
def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    """It would start with it, as it is shipped."""
    done = ran(tool("nginx"), "-t", *nginx_prefix(tmp_path), "-c", str(ROUTERS / "nginx.conf"))
    assert done.returncode == 0, done.stdout
    assert "test is successful" in done.stdout


@pytest.mark.tools
def test_nginx_refuses_a_directive_that_it_does_not_know(tmp_path: Path) -> None:
    """So the test before this one can fail."""
    wrong = tmp_path / "nginx.conf"
    wrong.write_text(text("nginx.conf").replace("least_conn;", "most_conn;"))
    done = ran(tool("nginx"), "-t", *nginx_prefix(tmp_path), "-c", str(wrong))
    assert done.returncode != 0
    assert 'unknown directive "most_conn"' in done.stdout


@pytest.mark.tools
def test_vllm_router_knows_every_flag() -> None:
    """Of the script."""
    known = set(re.findall(r"--[a-z-]+", ran(tool("vllm-router"), "--help").stdout))
    named = set(re.findall(r"(?<=[ (])--[a-z-]+", text(SCRIPT)))
    assert named
    assert named <= known


def test_routers_ask_routes_that_exist() -> None:
    """For health and for metrics."""
    endpoint = re.findall(r"--health-check-endpoint (\S+)", text(SCRIPT))
    (envoy,) = re.findall(r"http_health_check: \{path: (\S+)\}", text("envoy.yaml"))
    path = picker()["metrics-data-source"]["parameters"]["path"]
    assert {*endpoint, envoy, path} == {"/readyz", "/metrics/routing"}
    assert {*endpoint, envoy, path} <= routes()


def test_the_picker_reads_the_page_for_routers() -> None:
    """Every series, and none that the page lacks."""
    (engine,) = picker()["core-metrics-extractor"]["parameters"]["engineConfigs"]
    custom = {one["attributeKey"]: one["metricSpec"] for one in engine["customMetrics"]}
    standard = {spec for key, spec in engine.items() if key.endswith("Spec")}
    assert standard | set(custom.values()) == {series.name for series in ROUTING_SERIES}
    filters = [one for one in picker().values() if one["type"] == "endpoint-attribute-filter"]
    assert {one["parameters"]["attribute"] for one in filters} == set(custom)


def test_the_picker_refers_to_its_plugins() -> None:
    """Each that filters, scores or picks is in the profile, once."""
    (document,) = documents("llm-d/endpoint-picker-config.yaml")
    (profile,) = document["schedulingProfiles"]
    elsewhere = {"core-metrics-extractor", "metrics-data-source", "single-profile-handler"}
    named = [one["pluginRef"] for one in profile["plugins"]]
    assert sorted(named) == sorted(set(picker()) - elsewhere)


@pytest.mark.tools
@pytest.mark.parametrize("case", ["llm-d", "AIBrix", "behind a router"])
def test_the_pods_have_the_labels_that_routers_select(answer: Answer, case: str) -> None:
    """Those of the chart, for a release of the name that the files assume."""
    (labels,) = (template["metadata"]["labels"] for template in templates(answer, case))
    pool, _ = documents("llm-d/inference-pool.yaml")
    (stack,) = documents("production-stack/values.yaml")
    words = stack["routerSpec"]["extraArgs"]
    selector = dict(
        pair.split("=") for pair in words[words.index("--k8s-label-selector") + 1].split(",")
    )
    assert pool["spec"]["selector"]["matchLabels"] == selector
    assert selector["app.kubernetes.io/instance"] == RELEASE
    (engine,) = picker()["core-metrics-extractor"]["parameters"]["engineConfigs"]
    of_case = {
        "llm-d": {"llm-d.ai/engine-type": engine["name"]},
        "AIBrix": {"model.aibrix.ai/name": RELEASE},
    }
    wanted = {**selector, "app.kubernetes.io/instance": "demo", **of_case.get(case, {})}
    assert wanted.items() <= labels.items()


def test_the_picker_uses_the_label_of_the_pods() -> None:
    """The one with the range of lengths."""
    label = picker()["context-length-aware"]["parameters"]["label"]
    assert re.fullmatch(r"0-\d+", shipped("llm-d/chart-values.yaml")["podLabels"][label])


def test_every_port_is_that_of_the_server() -> None:
    """The one on which the chart serves, and `holdfast serve` by default."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    port = parse_serve(["m"], {}).listen.port
    assert values["service"]["port"] == port
    pool, _ = documents("llm-d/inference-pool.yaml")
    assert pool["spec"]["targetPorts"] == [{"number": port}]
    for name in ("vllm-router.sh", "litellm.yaml", "nginx.conf"):
        assert set(re.findall(r"10\.0\.0\.\d:(\d+)", text(name))) == {str(port)}
    assert re.findall(r"10\.0\.0\.\d, port_value: (\d+)", text("envoy.yaml")) == [str(port)] * 2
    (stack,) = documents("production-stack/values.yaml")
    words = stack["routerSpec"]["extraArgs"]
    assert words[words.index("--k8s-port") + 1] == str(port)
    labels = shipped("aibrix/chart-values.yaml")["podLabels"]
    assert labels["model.aibrix.ai/port"] == labels["model.aibrix.ai/metric-port"] == str(port)


@pytest.mark.parametrize("name", CHART_VALUES)
def test_replicas_refuse_at_once_and_keep_connections(name: str) -> None:
    """The flags are accepted, and idle connections live longer than in any router of ours."""
    settings = parse_serve(["m", *shipped("chart-values.yaml", name)["extraArgs"]], {})
    assert settings.supervision.hold_timeout_seconds == 0
    idle_seconds = [
        *re.findall(r"keepalive_timeout (\d+)s", text("nginx.conf")),
        *re.findall(r"(?<!stream_)idle_timeout: (\d+)s", text("envoy.yaml")),
    ]
    kept_seconds = settings.limits.keep_alive_timeout_seconds
    assert len(idle_seconds) == 2
    assert kept_seconds is not None
    assert all(float(one) < kept_seconds for one in (*idle_seconds, ENVOY_IDLE_SECONDS))
    assert f"--keep-alive-timeout {kept_seconds:g} " in PAGE.read_text()


@pytest.mark.tools
def test_replicas_keep_connections_longer_than_litellm() -> None:
    """Which has no setting for it in its file."""
    program = "from litellm.constants import AIOHTTP_KEEPALIVE_TIMEOUT as seconds; print(seconds)"
    done = ran(tool("routers-python"), "-c", program)
    settings = parse_serve(["m", *shipped("chart-values.yaml")["extraArgs"]], {})
    kept_seconds = settings.limits.keep_alive_timeout_seconds
    assert kept_seconds is not None
    assert float(done.stdout.splitlines()[-1]) < kept_seconds


def test_kserve_has_the_flags_of_the_chart() -> None:
    """What is true of replicas there is true of those here."""
    (only,) = pod_of_kserve()["spec"]["containers"]
    assert set(shipped("chart-values.yaml")["extraArgs"]) <= set(only["args"])


@pytest.mark.tools
def test_aibrix_finds_the_model_by_its_name(answer: Answer) -> None:
    """Served name, label and release are one."""
    served = flag_value(container(answer, "AIBrix")["args"], "--served-model-name")
    labels = shipped("aibrix/chart-values.yaml")["podLabels"]
    assert served == labels["model.aibrix.ai/name"] == RELEASE
