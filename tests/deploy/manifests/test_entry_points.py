"""A fleet of processes that are started, probed and stopped as the rendered manifests say: other ports, other
folders, the same commands, variables, probes and hooks."""

import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.parent_death import wrapped
from tests.conftest import free_port, nats_server_binary
from tests.deploy.commands import roost
from tests.deploy.manifests.install_helm import PROGRAM
from tests.deploy.manifests.render import command, environment, manifests
from tests.deploy.manifests.started import mounted, provide
from tests.deploy.manifests.test_containers import IMAGES
from tests.system.fleets import Home, Running, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM.exists(), reason=f"no {PROGRAM}: `make test` installs Helm"),
]
SETTINGS = ("router.preStopSeconds=5", "router.drainSeconds=5")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def container(name: str, example: str) -> dict[str, Any]:
    """One container of the rendered chart."""
    return next(
        each
        for one in manifests(example, *SETTINGS)
        if one["kind"] in ("Deployment", "StatefulSet")
        for each in one["spec"]["template"]["spec"]["containers"]
        if each["name"] == name
    )


@dataclass
class Pod:
    """A process that runs as a container of the chart would."""

    running: Running
    container: Mapping[str, Any]
    port: int
    ca: Path

    def status(self, path: str, headers: Mapping[str, str] | None = None) -> int | None:
        """Of an answer of its HTTP server; None: there is none."""
        context = ssl.create_default_context(cafile=str(self.ca))
        scheme = self.container["livenessProbe"]["httpGet"].get("scheme", "HTTP").lower()
        with (
            httpx.Client(verify=context, trust_env=False, timeout=10) as client,
            suppress(httpx.TransportError),
        ):
            return client.get(f"{scheme}://127.0.0.1:{self.port}{path}", headers=headers).status_code
        return None

    def probe(self, name: str) -> int | None:
        return self.status(self.container[name]["httpGet"]["path"])


@dataclass
class Cluster:
    """Folders, NATS and parts of one installation."""

    folder: Path
    stack: ExitStack
    nats: int

    @property
    def etc(self) -> Path:
        return self.folder / "etc/roost"

    def roost(self, variables: Mapping[str, str], *arguments: str) -> Running:
        running = Home(self.folder, dict(variables)).start(*arguments)
        self.stack.callback(_end, running)
        return running

    def here(self, container: Mapping[str, Any]) -> dict[str, str]:
        """Variables of a container, for this machine."""
        given = {name: mounted(value, self.folder) for name, value in environment(dict(container)).items()}
        return given | {"ROOST_BUS_URLS": f"nats://127.0.0.1:{self.nats}", "XDG_STATE_HOME": str(self.folder)}

    def start(self, name: str) -> Pod:
        """Start a part."""
        wanted = container(name, "small")
        (declared,) = wanted["ports"]
        port = free_port()
        words = [
            mounted(word, self.folder)
            .replace("0.0.0.0", "127.0.0.1")
            .replace(str(declared["containerPort"]), str(port))
            for word in command(wanted)
        ]
        running = self.roost(self.here(wanted), *words)
        return Pod(running, wanted, port, self.etc / "tls/ca.pem")


def _end(running: Running) -> None:
    if running.process.poll() is None:
        running.stop(signal.SIGTERM)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Secrets, and a NATS of the rendered configuration."""
    provide(tmp_path)
    (tmp_path / "var/lib/roost").mkdir(parents=True)
    etc = tmp_path / "etc/roost"
    assert roost("bus", "credentials", str(etc / "bus")).exit_code == 0
    config = next(
        one["data"]["nats.conf"]
        for one in manifests("small", *SETTINGS)
        if "nats.conf" in one.get("data", {})
    )
    port = free_port()
    for inside, here in (("4222", port), ("8222", free_port())):
        config = config.replace(f"0.0.0.0:{inside}", f"127.0.0.1:{here}")
    config = config.replace('"/data"', f'"{tmp_path}/data"').replace("/run/nats", str(tmp_path))
    (etc / "bus/nats.conf").write_text(config)
    program = [str(nats_server_binary()), "-c", str(etc / "bus/nats.conf")]
    with ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen(
                wrapped(program, os.getpid()),
                env={**os.environ, "POD_NAME": "roost-nats-0"},
                stderr=subprocess.DEVNULL,
            )
        )
        stack.callback(server.terminate)
        yield Cluster(tmp_path, stack, port)


def healthy(pod: Pod, name: str) -> bool:
    """Run the health check of the part's image, at its port here."""
    program = json.loads(IMAGES[name].last("HEALTHCHECK").partition(" CMD ")[2])[1:]
    words = [word.replace(IMAGES[name].last("EXPOSE"), str(pod.port)) for word in program]
    return subprocess.run([sys.executable, *words], timeout=30, check=False).returncode == 0


def test_parts_start_answer_their_probes_drain_and_stop_as_the_manifests_say(cluster: Cluster) -> None:
    pods = {name: cluster.start(name) for name in ("tracker", "planner", "router")}
    for name, pod in pods.items():
        until(lambda pod=pod: pod.probe("startupProbe") == 200, f"{name}:\n{pod.running.output}", 60)
        assert pod.probe("livenessProbe") == 200
        assert healthy(pod, name)

    router = pods["router"]
    assert router.probe("readinessProbe") == 503, "no engine is there"
    engine = {
        **cluster.here(container("agent", "vllm")),
        "ROOST_BUS_REPLICAS": "1",
        "ROOST_WORKER_FLEET_SECRET_FILE": str(cluster.etc / "fleet/fleet.secret"),
    }
    worker = cluster.roost(engine, "worker", "--engine", "simulated", "--ranks", "2")
    until(lambda: router.probe("readinessProbe") == 200, f"the engine to join:\n{worker.output}", 60)

    key = {"authorization": f"Bearer {(cluster.etc / 'client.key').read_text().strip()}"}
    assert router.status("/metrics") == 401
    assert router.status("/metrics", key) == 200
    scraper = {"authorization": f"Bearer {(cluster.etc / 'metrics/metrics.key').read_text().strip()}"}
    for name in ("planner", "tracker"):
        assert pods[name].status("/metrics") == 401
        assert pods[name].status("/metrics", scraper) == 200

    for name, pod in pods.items():
        loaded = Path(f"/proc/{pod.running.process.pid}/maps").read_text()
        assert "numpy" in loaded, "the look is at the right process"
        assert not re.search(r"libtorch|/torch/", loaded), name

    router.running.process.send_signal(signal.SIGTERM)
    until(lambda: router.probe("readinessProbe") == 503, "the router to report that it stops", 5)
    assert router.probe("livenessProbe") == 200, "it still takes requests"
    assert router.running.process.wait(timeout=20) == 0, router.running.output
    assert "accepts requests for another 5 s" in router.running.output

    hook = container("agent", "vllm")["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == ["/bin/sh", "-c"]
    drain, _, rest = hook[2].partition(";")
    assert rest.split() == ["sleep", "60"]
    program, *words = shlex.split(drain.replace("$ROOST_WORKER_NAME", engine["ROOST_WORKER_NAME"]))
    assert program == "roost"
    done = Home(cluster.folder, engine).run(*words)
    assert done.returncode == 0, done.stderr
    assert "its pod stops" in Home(
        cluster.folder, {**engine, "ROOST_BUS_CREDENTIALS_FILE": str(cluster.etc / "bus/operator.json")}
    ).output("status")

    for pod in (pods["planner"], pods["tracker"]):
        pod.running.process.send_signal(signal.SIGTERM)
        assert pod.running.process.wait(timeout=15) == 0, pod.running.output
    assert (cluster.folder / "var/lib/roost/tracker.state").exists()
