"""The Helm chart and the KServe files: Helm's own checks, Kubernetes' schemas, and the server's parser of flags."""

import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gangway.server.options.command_line import ServeOptions, parse_options
from testing.fetch.helm import BINARY

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "gangway"
MODELS = "--set=models.existingClaim=models"
EVERYTHING = (
    MODELS,
    "--set=autoscaling.enabled=true",
    "--set=serviceMonitor.enabled=true",
    "--set=prometheusRule.enabled=true",
    "--set=cache.existingClaim=cache",
    '--set-json=flags=["--model-control-mode=explicit","--load-model=*"]',
    '--set-json=extraVolumes=[{"name":"tls","secret":{"secretName":"tls"}}]',
    '--set-json=extraVolumeMounts=[{"name":"tls","mountPath":"/tls","readOnly":true}]',
    '--set-json=nodeSelector={"pool":"cpu"}',
    '--set-json=tolerations=[{"key":"cpu","operator":"Exists"}]',
)
SECURED = (MODELS, "--set=tls.secret=own")
CUSTOM_KINDS = ("ServiceMonitor", "PrometheusRule")
needs_helm = pytest.mark.skipif(not BINARY.exists(), reason="Helm is missing: `make tools` fetches it with npm")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BINARY), *arguments], check=False, capture_output=True, text=True, timeout=60)


def rendered(*values: str, release: str = "vision") -> dict[str, dict[str, Any]]:
    """What a release of the chart creates, by kind and name."""
    done = helm("template", release, str(CHART), *values)
    assert done.returncode == 0, done.stderr
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(done.stdout) if each}


def stateful_set(*values: str) -> dict[str, Any]:
    return rendered(*values)["StatefulSet/vision-gangway"]


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return container


def options_of(container: dict[str, Any], repository: Path) -> tuple[str, ServeOptions]:
    """Where the container finds its models, and what the server makes of its flags, given a folder that exists."""
    (folder,) = (each.partition("=")[2] for each in container["args"] if each.startswith("--model-repository="))
    command, *flags = (each.replace(f"={folder}", f"={repository}") for each in container["args"])
    assert command == "serve"
    return folder, parse_options(flags)


def runtime() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "kserve" / "serving-runtime.yaml").read_text())


@needs_helm
@pytest.mark.parametrize("values", [(MODELS,), EVERYTHING, SECURED], ids=["defaults", "everything", "TLS"])
def test_chart_passes_strict_lint(values: tuple[str, ...]) -> None:
    done = helm("lint", "--strict", str(CHART), *values)
    assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_kubernetes_schemas_accept_every_object(version: str) -> None:
    for values in ((MODELS,), EVERYTHING, SECURED):
        objects = rendered(*values)
        assert len(objects) >= 4
        for each in objects.values():
            if each["kind"] not in CUSTOM_KINDS:
                kubernetes_validate.validate(each, version, strict=True)


@needs_helm
def test_pod_is_restricted_and_gets_whole_cores() -> None:
    pod = stateful_set(MODELS)["spec"]["template"]["spec"]
    container = container_of(pod)
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert float(container["resources"]["limits"]["cpu"]).is_integer()
    # Pod Security "restricted"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


@needs_helm
def test_server_accepts_flags_and_ports_of_the_chart(tmp_path: Path) -> None:
    container = container_of(stateful_set(*EVERYTHING)["spec"]["template"]["spec"])
    models, options = options_of(container, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": options.http.port, "grpc": options.grpc.port, "metrics": options.metrics.port}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(options.general.cache_dir), models, "/tls"} <= mounts
    assert options.repository.mode == "explicit"


@needs_helm
@pytest.mark.parametrize(
    ("values", "scheme", "protocols"),
    [
        ((), "HTTP", ["http", "kubernetes.io/h2c"]),
        (("--set=tls.secret=own",), "HTTPS", ["https", "https"]),
        (("--set=tls.secret=own", "--set=tls.grpc=false"), "HTTPS", ["https", "kubernetes.io/h2c"]),
        (("--set=tls.secret=own", "--set=tls.http=false"), "HTTP", ["http", "https"]),
        (('--set-json=flags=["--http-use-ssl=true"]',), "HTTPS", ["https", "kubernetes.io/h2c"]),
    ],
)
def test_probes_and_services_follow_tls(values: tuple[str, ...], scheme: str, protocols: list[str]) -> None:
    objects = rendered(MODELS, *values)
    container = container_of(objects["StatefulSet/vision-gangway"]["spec"]["template"]["spec"])
    probes = [container[f"{kind}Probe"]["httpGet"]["scheme"] for kind in ("startup", "liveness", "readiness")]
    assert probes == [scheme] * 3
    for name in ("Service/vision-gangway", "Service/vision-gangway-headless"):
        ports = {port["name"]: port.get("appProtocol") for port in objects[name]["spec"]["ports"]}
        assert [ports["http"], ports["grpc"]] == protocols


@needs_helm
def test_the_secret_is_where_the_flags_say(tmp_path: Path) -> None:
    pod = stateful_set(*SECURED)["spec"]["template"]["spec"]
    container = container_of(pod)
    (folder,) = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "gangway-tls"]
    assert {"name": "gangway-tls", "secret": {"secretName": "own"}} in pod["volumes"]
    written = {f"{folder}/{name}" for name in ("tls.crt", "tls.key")}
    for protocol in ("grpc", "http"):
        assert {f.partition("=")[2] for f in container["args"] if f.startswith(f"--{protocol}-server-")} == written


@needs_helm
def test_kubelet_waits_longer_than_the_server_drains() -> None:
    pod = stateful_set(MODELS, "--set=drainSeconds=90", "--set=shutdownDelaySeconds=7")["spec"]["template"]["spec"]
    container = container_of(pod)
    assert "--exit-timeout-secs=90" in container["args"]
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == 7
    assert pod["terminationGracePeriodSeconds"] > 97


@needs_helm
def test_each_replica_has_its_cache_unless_a_claim_is_named() -> None:
    (claim,) = stateful_set(MODELS, "--set=cache.storageClass=fast")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    shared = stateful_set(*EVERYTHING)["spec"]
    assert "volumeClaimTemplates" not in shared
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}} in shared["template"]["spec"]["volumes"]


@needs_helm
def test_selectors_find_the_pods() -> None:
    objects = rendered(*EVERYTHING)
    labels = objects["StatefulSet/vision-gangway"]["spec"]["template"]["metadata"]["labels"].items()
    for name in ("Service/vision-gangway", "Service/vision-gangway-headless"):
        assert objects[name]["spec"]["selector"].items() <= labels
    for name in ("StatefulSet/vision-gangway", "PodDisruptionBudget/vision-gangway"):
        assert objects[name]["spec"]["selector"]["matchLabels"].items() <= labels
    wanted = objects["ServiceMonitor/vision-gangway"]["spec"]["selector"]["matchLabels"].items()
    scraped = [each["metadata"]["name"] for each in objects.values() if wanted <= each["metadata"]["labels"].items()]
    assert scraped == ["vision-gangway"]  # the headless service has no port for metrics


@needs_helm
def test_names_of_two_releases_differ_and_fit() -> None:
    assert not set(rendered(MODELS, release="a")) & set(rendered(MODELS, release="b"))
    for release in ("gangway", "x" * 53):
        assert all(len(name.partition("/")[2]) <= 63 for name in rendered(MODELS, release=release))


@needs_helm
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((), "set models.existingClaim or models.hostPath"),
        ((MODELS, "--set=models.hostPath=/m"), "not both"),
        ((MODELS, "--set=resources.cpu=2.5"), "/resources/cpu"),
        ((MODELS, "--set=replica=3"), "'replica' not allowed"),
        ((MODELS, "--set=cache.size=10"), "/cache/size"),
        ((MODELS, "--set=flags={-v}"), "/flags/0"),
        ((MODELS, "--set=autoscaling.enabled=true", "--set=autoscaling.minReplicas=9"), "minReplicas is larger"),
    ],
)
def test_wrong_values_are_refused_with_the_reason(values: tuple[str, ...], reason: str) -> None:
    done = helm("template", "vision", str(CHART), *values)
    assert done.returncode != 0
    assert reason in done.stderr


@needs_helm
def test_operator_gets_the_rules_of_the_chart() -> None:
    rule = rendered(*EVERYTHING)["PrometheusRule/vision-gangway"]
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    assert json.dumps(rule["spec"]).count('"expr"') >= 5


def test_server_accepts_flags_and_ports_of_the_kserve_runtime(tmp_path: Path) -> None:
    container = container_of(runtime()["spec"])
    models, options = options_of(container, tmp_path)
    assert models == "/mnt/models"  # where KServe puts them
    assert {container[probe]["httpGet"]["port"] for probe in container if probe.endswith("Probe")} == {
        options.http.port
    }
    service = yaml.safe_load((DEPLOY / "kserve" / "inference-service.yaml").read_text())
    (port,) = service["spec"]["predictor"]["model"]["ports"]
    assert port["containerPort"] == options.grpc.port
    assert runtime()["spec"]["annotations"]["prometheus.kserve.io/port"] == str(options.metrics.port)
    formats = {each["name"] for each in runtime()["spec"]["supportedModelFormats"]}
    assert service["spec"]["predictor"]["model"]["modelFormat"]["name"] in formats
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > options.general.exit_timeout_secs


def test_kserve_runtime_is_a_valid_restricted_pod() -> None:
    spec = {key: runtime()["spec"][key] for key in ("containers", "volumes")}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gangway"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.37", strict=True)
    container = container_of(spec)
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
