"""The chart renders manifests that Kubernetes accepts, whose commands, paths, ports and metrics exist."""

import copy
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.configuration_loader import ConfigError
from deploy.local.nats_server import binary
from deploy.sections import read_settings
from engine_adapter.vllm.config import VllmConfig
from router.config import RouterConfig
from tests.deploy.commands import roost
from tests.deploy.manifests.exposed import series
from tests.deploy.manifests.install_helm import PROGRAM
from tests.deploy.manifests.render import (
    CHART,
    EXAMPLES,
    WRITTEN,
    Refused,
    command,
    environment,
    file_of,
    manifests,
    page,
    rendered,
)
from tests.deploy.manifests.started import ROOT, mounted, provide, start

kubernetes_validate = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate (extra dev) holds the schemas"
)
pytestmark = pytest.mark.skipif(
    not PROGRAM.exists(), reason=f"no {PROGRAM}: `make test` installs Helm on Linux of x86-64"
)
CASES: Mapping[str, tuple[str | None, tuple[str, ...]]] = {
    "defaults": (None, ()),
    "vllm": ("vllm", ()),
    "sglang": ("sglang", ()),
    "small": ("small", ()),
    "tls": (None, ("bus.caSecret=bus-ca", "nats.tlsSecret=nats-tls", "imagePullSecrets[0].name=pull")),
    "gateway": (None, ("gateway.enabled=true", "gateway.caConfigMap=roost-ca")),
    "pool": ("vllm", ("gateway.enabled=true", "gateway.inferencePool.enabled=true")),
}
VERSIONS = ("1.31", "1.37")
"""The oldest that the chart is for, and the newest."""
OTHER_GROUPS = {
    "monitoring.coreos.com/v1",
    "gateway.networking.k8s.io/v1",
    "inference.networking.k8s.io/v1",
}
"""Custom resources, which Kubernetes' own schemas do not describe."""
ROOSTS = {"router", "planner", "tracker", "agent"}
Manifest = dict[str, Any]


def case(name: str) -> tuple[Manifest, ...]:
    example, settings = CASES[name]
    return manifests(example, *settings)


def of_kind(name: str, kind: str) -> list[Manifest]:
    return [one for one in case(name) if one["kind"] == kind]


def templates(name: str) -> Iterator[Manifest]:
    """Pods that the case would start."""
    for one in case(name):
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]


def containers(name: str) -> Iterator[tuple[Manifest, Manifest]]:
    """Containers with their pods."""
    return ((pod, container) for pod in templates(name) for container in pod["spec"]["containers"])


@cache
def accepted(version: str, text: str) -> None:
    """Validate one manifest against the OpenAPI schema of a version of Kubernetes, unknown fields included."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


@pytest.mark.parametrize(
    ("name", "version"),
    [*((name, VERSIONS[-1]) for name in CASES), ("vllm", VERSIONS[0]), ("sglang", VERSIONS[0])],
)
def test_kubernetes_accepts_what_the_chart_renders(name: str, version: str) -> None:
    known = [one for one in case(name) if one["apiVersion"] not in OTHER_GROUPS]
    for one in known:
        accepted(version, json.dumps(one, sort_keys=True))
    assert (len(known) < len(case(name))) == (name in ("sglang", "gateway", "pool"))


def test_the_check_finds_a_wrong_field() -> None:
    wrong = copy.deepcopy(of_kind("defaults", "Deployment")[0])
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_helm_finds_no_fault_in_the_chart() -> None:
    done = subprocess.run(
        [str(PROGRAM), "lint", "--strict", str(CHART)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", WRITTEN)
def test_the_plain_manifests_are_what_the_chart_renders(name: str) -> None:
    assert file_of(name).read_text() == page(name), "run `make manifests`"


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("rooter.replicas=2", "'rooter'"),
        ("router.replica=2", "'replica'"),
        ("nats.replicas=2", "/nats/replicas"),
    ],
)
def test_a_mistyped_value_is_refused_by_name(setting: str, named: str) -> None:
    with pytest.raises(Refused, match=named):
        rendered(None, setting)


def test_a_foreign_nats_needs_its_address() -> None:
    with pytest.raises(Refused, match=r"bus\.urls"):
        rendered(None, "nats.enabled=false")


# Commands


@pytest.mark.parametrize("name", CASES)
def test_every_part_starts_with_the_options_and_variables_of_its_container(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: None
) -> None:
    provide(tmp_path)
    (tmp_path / "etc/roost/bus-ca").mkdir()
    (tmp_path / "etc/roost/bus-ca/ca.crt").write_bytes((tmp_path / "etc/roost/tls/ca.pem").read_bytes())
    (settings,) = (one for one in of_kind(name, "ConfigMap") if "roost.toml" in one["data"])
    (tmp_path / "etc/roost/config/roost.toml").write_text(settings["data"]["roost.toml"])
    seen = set()
    for pod, container in containers(name):
        if container["name"] not in ROOSTS:
            continue
        given = {key: mounted(value, tmp_path) for key, value in environment(container).items()}
        words = [mounted(word, tmp_path) for word in command(container)]
        started = start(monkeypatch, words, given)
        seen.add(started.part)
        if started.part == "router":
            config = started.settings.part(RouterConfig)
            assert {"name": "http", "containerPort": config.port} in container["ports"]
            stopping = config.pre_stop_seconds + config.drain_seconds
            assert pod["spec"]["terminationGracePeriodSeconds"] > stopping
        if started.part == "vllm":
            plugin = environment(next(one for one in pod["spec"]["containers"] if one["name"] == "server"))
            assert plugin["ROOST_AGENT"] == started.settings.part(VllmConfig).listen
            assert mounted(plugin["ROOST_SECRET_FILE"], tmp_path) == given["ROOST_VLLM_SECRET_FILE"]
    engine = {"pool": "vllm"}.get(name, name)
    assert seen == {"router", "planner", "tracker"} | ({engine} & {"vllm", "sglang"})


@pytest.mark.parametrize("name", CASES)
def test_every_file_that_a_container_names_is_mounted_into_it(name: str) -> None:
    for pod, container in containers(name):
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        claimed = {"state", "data"}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) <= set(volumes) | claimed, container["name"]
        words = [*container.get("args", ()), *environment(container).values()]
        paths = [word for word in words if re.match(r"/(etc|var|run|models|data)/", word)]
        for path in paths:
            mount = next((mounts[folder] for folder in mounts if f"{path}/".startswith(f"{folder}/")), None)
            assert mount is not None, f"{container['name']}: {path}"
            items = volumes.get(mount, {}).get("secret", {}).get("items")
            if items is not None:
                assert Path(path).name in {item["path"] for item in items}


def test_the_page_says_how_each_secret_and_each_of_its_files_is_made() -> None:
    text = (ROOT.parents[1] / "docs/kubernetes.md").read_text()
    secrets = [
        volume["secret"]
        for name in ("defaults", "vllm")
        for pod in templates(name)
        for volume in pod["spec"]["volumes"]
        if "secret" in volume
    ]
    assert secrets
    for secret in secrets:
        assert secret["secretName"] in text
        assert all(item["key"] in text or "*.json" in text for item in secret.get("items", ()))


# Pods


@pytest.mark.parametrize("name", CASES)
def test_no_container_has_rights_that_it_does_not_need(name: str) -> None:
    for pod, container in containers(name):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", CASES)
def test_probes_ask_ports_that_the_container_has(name: str) -> None:
    for _, container in containers(name):
        ports = {port["name"] for port in container.get("ports", ())}
        probes = [probe for key, probe in container.items() if key.endswith("Probe")]
        assert len(probes) == (0 if container["name"] == "agent" else 3)
        assert {probe["httpGet"]["port"] for probe in probes} <= ports
        if container["name"] == "router":
            asked = {(probe["httpGet"]["path"], probe["httpGet"]["scheme"]) for probe in probes}
            scheme = "HTTP" if name == "sglang" else "HTTPS"
            assert asked == {("/health", scheme), ("/ready", scheme)}


def test_variables_of_services_would_be_refused_so_no_pod_gets_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ROOST_ROUTER_SERVICE_HOST"):
        read_settings(None, {"ROOST_ROUTER_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    assert all(pod["spec"]["enableServiceLinks"] is False for name in CASES for pod in templates(name))


def test_a_pod_gets_the_login_of_its_own_role_alone() -> None:
    for pod, container in containers("vllm"):
        if container["name"] in ROOSTS:
            (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "bus")
            (item,) = volume["secret"]["items"]
            role = {"agent": "engine"}.get(container["name"], container["name"])
            assert item["key"] == f"{role}.json"


# Selectors, scaling, alerts


def matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", selector if "matchExpressions" not in selector else {})
    keys = {one["key"] for one in selector.get("matchExpressions", ())}
    return wanted.items() <= labels.items() and keys <= labels.keys()


@pytest.mark.parametrize("name", CASES)
def test_every_selector_selects_pods_of_the_chart(name: str) -> None:
    labels = [pod["metadata"]["labels"] for pod in templates(name)]
    selectors = [
        (one["kind"], one["metadata"]["name"], one["spec"].get("podSelector") or one["spec"]["selector"])
        for one in case(name)
        if one["kind"]
        in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "Deployment", "StatefulSet")
    ]
    for kind, named, selector in selectors:
        found = [matches(selector, one) for one in labels]
        several = kind == "NetworkPolicy" and named.endswith("-engines")
        assert sum(found) == 1 or (several and any(found)), (kind, named)


def test_routers_are_scaled_by_a_series_that_exists_and_that_the_adapter_offers() -> None:
    (scaler,) = of_kind("defaults", "HorizontalPodAutoscaler")
    named = [one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"] if one["type"] == "Pods"]
    offered = yaml.safe_load((ROOT / "observability/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert named
    assert set(named) <= series()
    assert set(named) <= {rule["name"]["as"] for rule in offered}
    (router,) = (
        one for one in of_kind("defaults", "Deployment") if one["metadata"]["name"] == "roost-router"
    )
    assert "replicas" not in router["spec"], "the autoscaler sets them"
    assert scaler["spec"]["scaleTargetRef"]["name"] == router["metadata"]["name"]


def test_alerts_of_the_operator_link_to_the_operators_runbook_and_to_jobs_of_its_monitors() -> None:
    (rules,) = of_kind("sglang", "PrometheusRule")
    text = yaml.safe_dump(rules)
    assert "docs/runbook.md" not in text.replace("https://wiki.example/roost/runbook.md", "")
    assert 'job="llm/roost-router"' in text
    plain = yaml.safe_load((ROOT / "observability/alerts.yaml").read_text())
    assert len(rules["spec"]["groups"]) == len(plain["groups"])
    (boards,) = (one for one in of_kind("sglang", "ConfigMap") if one["metadata"]["name"] == "roost-boards")
    assert sorted(boards["data"]) == ["loop.json", "router.json"]


# NATS


@pytest.mark.parametrize("name", ["defaults", "small"])
def test_the_nats_server_accepts_its_configuration(name: str, tmp_path: Path) -> None:
    (config,) = (one for one in of_kind(name, "ConfigMap") if "nats.conf" in one["data"])
    assert roost("bus", "credentials", str(tmp_path)).exit_code == 0
    (tmp_path / "nats.conf").write_text(config["data"]["nats.conf"].replace('"/data"', f'"{tmp_path}"'))
    done = subprocess.run(
        [binary(), "-t", "-c", str(tmp_path / "nats.conf")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={"POD_NAME": "roost-nats-0"},
    )
    assert done.returncode == 0, done.stderr


def test_servers_of_nats_look_for_each_other_by_the_names_of_their_pods() -> None:
    (config,) = (one for one in of_kind("defaults", "ConfigMap") if "nats.conf" in one["data"])
    (servers,) = (
        one for one in of_kind("defaults", "StatefulSet") if one["metadata"]["name"] == "roost-nats"
    )
    spec = servers["spec"]
    routes = re.findall(r"nats://([\w.-]+):6222", config["data"]["nats.conf"])
    assert routes == [f"roost-nats-{pod}.{spec['serviceName']}.llm.svc" for pod in range(spec["replicas"])]
    (peers,) = (
        one for one in of_kind("defaults", "Service") if one["metadata"]["name"] == spec["serviceName"]
    )
    assert peers["spec"]["clusterIP"] == "None"
    (router, *_) = (container for _, container in containers("defaults") if container["name"] == "router")
    assert environment(router)["ROOST_BUS_REPLICAS"] == str(spec["replicas"])


def test_the_chart_refuses_versions_of_kubernetes_that_it_is_not_checked_with() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} <= set(CASES)


# Endpoint picker


def test_the_pool_has_the_servers_and_the_picker_that_exist() -> None:
    (pool,), (route,) = of_kind("pool", "InferencePool"), of_kind("pool", "HTTPRoute")
    spec, (rule,) = pool["spec"], route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["group"], backend["kind"], backend["name"]) == (
        pool["apiVersion"].partition("/")[0],
        pool["kind"],
        pool["metadata"]["name"],
    )
    chosen = [
        pod
        for pod in templates("pool")
        if spec["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ]
    servers = {
        port["containerPort"]
        for pod in chosen
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
    }
    assert servers == {port["number"] for port in spec["targetPorts"]} == {8000}
    picker = spec["endpointPickerRef"]
    service = next(one for one in of_kind("pool", "Service") if one["metadata"]["name"] == picker["name"])
    (port,) = (one for one in service["spec"]["ports"] if one["port"] == picker["port"]["number"])
    router = next(container for _, container in containers("pool") if container["name"] == "router")
    (named,) = (one for one in router["ports"] if one["name"] == port["targetPort"])
    assert f"0.0.0.0:{named['containerPort']}" in command(router)


def test_a_pool_takes_no_engines_that_need_a_router() -> None:
    with pytest.raises(Refused, match="token ids"):
        rendered("sglang", "gateway.enabled=true", "gateway.inferencePool.enabled=true")
