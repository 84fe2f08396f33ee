"""deploy/compose: files that are what their programmes want, and queries that a live Prometheus answers."""

import importlib.util
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from testing.fetch.prometheus import find
from testing.live_server import LiveServer, free_port
from testing.waiting import until

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose"
DASHBOARD = COMPOSE / "grafana" / "dashboards" / "gangway.json"
TIMEOUT_S = 30

needs_prometheus = pytest.mark.skipif(
    find("prometheus") is None or find("promtool") is None,
    reason="Prometheus is missing, and `make tools` could not fetch it",
)


def promtool(*arguments: Path | str) -> None:
    ended = subprocess.run([find("promtool") or "", *arguments], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_prometheus
def test_rules_and_their_alerts() -> None:
    promtool("check", "config", COMPOSE / "prometheus.yaml")  # and the rules that it names
    promtool("test", "rules", Path(__file__).parent / "rules_test.yaml")


def test_the_compose_file_is_one() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    ended = subprocess.run([*command, COMPOSE / "compose.yaml"], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def test_the_dashboard_is_what_its_program_writes() -> None:
    spec = importlib.util.spec_from_file_location("dashboard", COMPOSE / "dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.text() == DASHBOARD.read_text(), "run `python deploy/compose/dashboard.py`"


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus with the rules of deploy/compose that scrapes a server."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=TIMEOUT_S) as got:
            return json.load(got)["data"]

    def values(self, expr: str) -> list[float]:
        """The numbers that an expression has now; an error of it is raised."""
        values = (float(each["value"][1]) for each in self.get("/api/v1/query", query=expr)["result"])
        return [value for value in values if not np.isnan(value)]

    def rules(self) -> dict[str, Any]:
        (group,) = self.get("/api/v1/rules")["groups"]
        return {rule["name"]: rule for rule in group["rules"]}


@pytest.fixture(scope="module")
def prometheus(gangway_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    address = gangway_server.metrics_url.removeprefix("http://").removesuffix("/metrics")
    config = (COMPOSE / "prometheus.yaml").read_text().replace("gangway:8002", address).replace("5s", "100ms")
    (folder / "prometheus.yaml").write_text(config)
    (folder / "rules.yaml").write_text((COMPOSE / "rules.yaml").read_text())
    port = free_port()
    flags = ("--config.file=prometheus.yaml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}")
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([find("prometheus") or "", *flags], cwd=folder, stdout=log, stderr=log) as process,
    ):
        try:
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.kill()


def use_every_model_once(server: LiveServer) -> None:
    with triton.InferenceServerClient(server.url) as client:
        for model in client.get_model_repository_index(as_json=True)["models"]:
            metadata = client.get_model_metadata(model["name"], as_json=True)
            inputs = []
            for each in metadata["inputs"]:
                shape = [max(1, int(size)) for size in each["shape"]]
                tensor = triton.InferInput(each["name"], shape, each["datatype"])
                tensor.set_data_from_numpy(np.zeros(shape, triton.triton_to_np_dtype(each["datatype"])))
                inputs.append(tensor)
            client.infer(model["name"], inputs)


@pytest.mark.long
@needs_prometheus
def test_a_live_prometheus_answers_every_query(prometheus: Prometheus, gangway_server: LiveServer) -> None:
    board = json.loads(DASHBOARD.read_text())
    queries = {
        f"{panel['title']}: {target.get('legendFormat', '')}": target["expr"]
        .replace("$__rate_interval", "1m")
        .replace("$instance", ".+")
        .replace("$model", ".+")
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    wait_until_it_listens(prometheus)
    rules = prometheus.rules()
    queries |= {
        name: re.split(" (?:[<>]|==) ", rule["query"])[0] for name, rule in rules.items()
    }  # of alerts, what is compared
    deadline = time.monotonic() + TIMEOUT_S
    while missing := {name for name, expr in queries.items() if not prometheus.values(expr)}:
        assert time.monotonic() < deadline, f"no data: {missing}"
        use_every_model_once(gangway_server)
    for name, rule in prometheus.rules().items():
        assert rule["health"] == "ok" and "lastError" not in rule and rule.get("state") != "firing", name
    for variable in board["templating"]["list"][1:]:
        series, label = variable["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
        found = prometheus.get("/api/v1/series", **{"match[]": series.replace("$instance", ".+")})
        assert all(label in each for each in found) and found, variable["name"]


def wait_until_it_listens(prometheus: Prometheus) -> None:
    def listens() -> bool:
        try:
            return bool(prometheus.get("/api/v1/status/buildinfo"))
        except urllib.error.URLError:
            return False

    until(listens)
