"""A target that is a multiple: the profile in the cache says how long the model takes alone, at each start."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

from gangway.artifact.profile import LayerProfile, Profile, ProfiledMachine, machine_id, write_profile
from gangway.artifact.reader import read_manifest
from gangway.base.host_limits import cpu_name
from gangway.clients.perf.command import main as perf
from gangway.scheduler.policies.targets import REQUEST_US
from testing.reference import example_of
from testing.repository import GANGWAY
from tests.conftest import CompiledZoo
from tests.helpers.profiles import PROFILE
from tests.helpers.served import inputs_of, serving

COMPUTE_US = 20_000.0  # on both cores, by the profile; it takes some microseconds
TARGET_US = 3 * (COMPUTE_US + REQUEST_US)


def profiled(artifact: Path) -> Profile:
    """A profile of two whole cores, on one of which a row takes twice as long."""
    manifest = read_manifest(artifact)
    target, cpu = manifest.target.name, cpu_name()
    times_us = ((2 * COMPUTE_US,), (COMPUTE_US,))
    each_us = tuple((time_us / len(manifest.layers),) for (time_us,) in times_us)
    layers = tuple(
        LayerProfile(layer.name, (each_us,) * len(layer.versions), 1.0, 1.0, (), ()) for layer in manifest.layers
    )
    machine = ProfiledMachine(machine_id(cpu, 2, target), cpu, 2, target, 1.0, 1.0)
    return replace(PROFILE, key=artifact.name, model_name="mlp", machine=machine, layers=layers,
                   isolated_us=times_us, together_us=times_us)  # fmt: skip


def test_server_perf_and_capacity_have_the_target_of_the_profile(compiled_zoo: CompiledZoo, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    cache = compiled_zoo.linked_cache(tmp_path / "cache")
    write_profile(cache, profiled(cache / compiled_zoo.artifact("mlp").name))
    for name in ("mlp", "same_file"):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "1").symlink_to(compiled_zoo.repository / "mlp" / "1")
        (folder / "config.pbtxt").write_text('parameters { key: "qos_ms" value { string_value: "3x" } }')
    example = example_of("mlp", compiled_zoo.onnx_file("mlp"))
    with serving(tmp_path / "models", f"--cache-dir={cache}", "--cores=0-1") as served:
        inputs = inputs_of(example.inputs)
        answer = served.client.infer("mlp", inputs, parameters={"gangway_stats": True}).get_response()
        assert answer.parameters["target_us"].int64_param == TARGET_US
        assert "a multiple of that, but" not in served.server.log.read_text(), "no target is raised"
        result, flags = tmp_path / "result.json", ("--rate=50", "--queries=5", "--warmup=0", "--isolated=mlp=5")
        assert perf([served.server.url, "--mix=mlp=1", "--qos=config", *flags, f"--json={result}"]) == 0
    assert json.loads(result.read_text())["models"][0]["targets_us"] == {"qos": TARGET_US}
    command = [
        *GANGWAY,
        "capacity",
        "mlp=10@3x",
        "same_file=1@3x",
        "--cores=2",
        "--queries=50",
        "--json",
        f"--cache-dir={cache}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [model["target_us"] for model in json.loads(done.stdout)["models"]] == [TARGET_US] * 2
    assert f"in {cache}" in done.stderr and "mlp of 20" in done.stderr
