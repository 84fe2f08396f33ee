"""`gangway check`: what it says of each kind of model is what a server then does with it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.check.repairs import RepairedModel, repair
from gangway.server.check.trial import STOP_S, trial_server
from gangway.server.models.config_text import read_config
from testing.live_server import live_server
from testing.processes import descendants_of
from testing.repository import GANGWAY
from testing.waiting import until
from tests.helpers import ensemble_configs
from tests.helpers.repository_kinds import CANNOT, CHANGES, KINDS, MOVES, TENSORS, model, write_all
from tests.helpers.whole_server import alive

pytestmark = pytest.mark.long

FIELDS = {
    "batch_in_dims": ("input 'x': dims", "output 'y': dims"),
    "copied_folder": ("name",),
    "decoupled": ("model_transaction_policy.decoupled",),
    "fixed_batch": ("max_batch_size",),
    "loose_file": ("layout",),
    "misspelt": ("parameters['qos-ms']",),
    "no_version": ("layout",),
    "other_filename": ("default_model_filename",),
    "other_type": ("input 'x': data_type",),
    "preferred": ("dynamic_batching.preferred_batch_size",),
}


@dataclass(frozen=True)
class Checked:
    """A repository that --fix has changed: what the command said of each model, and a server of the result."""

    repository: Path
    reports: dict[str, dict[str, Any]]
    status: int
    client: triton.InferenceServerClient


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    folder = tmp_path_factory.mktemp("check")
    repository, cache = write_all(folder / "models"), f"--cache-dir={folder / 'cache'}"
    command = [*GANGWAY, "check", str(repository), "--fix", "--json", cache]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    reports = {report["name"]: report for report in json.loads(done.stdout)}
    with live_server(repository, [cache, "--model-control-mode=explicit"]) as server:
        yield Checked(repository, reports, done.returncode, triton.InferenceServerClient(server.url))


def test_every_model_has_a_verdict(checked: Checked) -> None:
    assert {name: report["verdict"] for name, report in checked.reports.items()} == {
        name: verdict for name, (verdict, _) in KINDS.items()
    }
    assert checked.status == 1, "some cannot move"


@pytest.mark.parametrize("name", [name for name, (verdict, _) in KINDS.items() if verdict != CANNOT])
def test_what_moves_is_served_and_answers(checked: Checked, name: str) -> None:
    checked.client.load_model(name)
    config = checked.client.get_model_config(name).config
    rows = np.array([[-1.0, 2.0, -3.0, 4.0]], np.float32)
    tensor = triton.InferInput(config.input[0].name, list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows)
    answer = checked.client.infer(name, [tensor]).as_numpy(config.output[0].name)
    assert answer.tolist() == [[0.0, 2.0, 0.0, 4.0]]


@pytest.mark.parametrize("name", [name for name, (verdict, _) in KINDS.items() if verdict == CANNOT])
def test_what_cannot_move_is_refused_for_the_reason_that_was_given(checked: Checked, name: str) -> None:
    with pytest.raises(InferenceServerException) as refused:
        checked.client.load_model(name)
    reason = checked.reports[name]["changes"][-1]["reason"]
    assert reason.splitlines()[0][:60] in str(refused.value)


@pytest.mark.parametrize(("name", "file"), [("no_weights", "1/weights.bin"), ("no_sample", "warmup/absent")])
def test_a_missing_file_is_named_where_it_should_lie(checked: Checked, name: str, file: str) -> None:
    reason = checked.reports[name]["changes"][-1]["reason"]
    assert reason.endswith(f"No such file or directory: '{checked.repository / name / file}'")
    assert "Errno" not in reason


def test_changes_name_their_fields(checked: Checked) -> None:
    changed = {name: tuple(change["field"] for change in report["changes"])
               for name, report in checked.reports.items() if report["verdict"] == CHANGES}  # fmt: skip
    assert changed == FIELDS


def test_code_keeps_what_only_it_can_have() -> None:
    config = ModelConfig()
    config.model_transaction_policy.decoupled = True
    config.parameters["qos-ms"].string_value = "own"
    assert repair(config, RepairedModel("m", is_python=True)).changes == ()
    assert len(repair(config, RepairedModel("m")).changes) == 2


def test_what_a_configuration_says_beside_its_changes_stays(checked: Checked) -> None:
    config = read_config(checked.repository / "preferred" / "config.pbtxt")
    assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (8, [4])
    assert "16" in (checked.repository / "preferred" / "config.pbtxt.orig").read_text()
    assert read_config(checked.repository / "misspelt" / "config.pbtxt").parameters["qos_ms"].string_value == "15"


def test_models_that_move_or_cannot_are_not_written(checked: Checked) -> None:
    for name, (verdict, _) in KINDS.items():
        if verdict != CHANGES:
            assert not (checked.repository / name / "config.pbtxt.orig").exists()


def test_fields_without_effect_are_named(checked: Checked) -> None:
    told = {name: report["without_effect"] for name, report in checked.reports.items() if report["without_effect"]}
    assert set(told) == {"for_gpus", "openvino"}


def test_a_target_that_no_request_can_meet_is_named_with_one_that_is_possible(checked: Checked) -> None:
    told = {name: report["impossible"] for name, report in checked.reports.items() if report["impossible"]}
    assert set(told) == {"impossible"}
    assert told["impossible"].startswith("latency target of 0.010 ms is out of reach: a request takes 0.1")
    assert told["impossible"].endswith("set a larger target: 3x would be 3.100 ms")


def test_the_file_is_named_once_where_its_text_is_wrong(checked: Checked) -> None:
    (change,) = checked.reports["no_text"]["changes"]
    assert change["field"] == "config.pbtxt" and "config.pbtxt" not in change["reason"]


def test_a_second_check_finds_nothing_to_change(checked: Checked, tmp_path: Path) -> None:
    kept = [name for name, (verdict, _) in KINDS.items() if verdict == CHANGES]
    for name in kept:
        (tmp_path / name).symlink_to(checked.repository / name)
    cache = f"--cache-dir={checked.repository.parent / 'cache'}"
    done = subprocess.run(
        [*GANGWAY, "check", str(tmp_path), "--json", cache], capture_output=True, text=True, check=False
    )
    assert {report["verdict"] for report in json.loads(done.stdout)} == {MOVES}, done.stderr
    assert done.returncode == 0


def test_settings_of_the_caller_do_not_reach_the_server_for_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGWAY_CONFIG", str(tmp_path / "absent.toml"))
    monkeypatch.setenv("GANGWAY_HTTP_PORT", "no port")
    with trial_server(str(tmp_path / "cache")) as server:
        assert server.load("absent").reason, "it runs, and answers"


@pytest.mark.parametrize("name", ["absent", "model.txt"])
def test_what_is_no_repository_is_an_error_that_says_what_is_expected(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.txt").write_text("no model")
    done = subprocess.run([*GANGWAY, "check", str(tmp_path / name)], capture_output=True, text=True, check=False)
    why = "is neither a folder nor an .onnx file" if name == "model.txt" else "does not exist"
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2, f"gangway check: error: argument PATH: {tmp_path / name} {why}"
    )  # fmt: skip


def test_an_empty_repository_is_an_error_that_says_how_models_lie(tmp_path: Path) -> None:
    done = subprocess.run([*GANGWAY, "check", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "NAME/1/model.onnx" in done.stderr


HANGS = """import pathlib, threading


class TritonPythonModel:
    def initialize(self, args):
        with pathlib.Path("{started}").open("a") as file:
            file.write("started\\n")
        threading.Event().wait()
"""


def write_hanging(repository: Path, started: Path) -> None:
    """A model whose `initialize` does not end, and an ensemble of it."""
    (repository / "hangs" / "1").mkdir(parents=True)
    (repository / "hangs" / "1" / "model.py").write_text(HANGS.format(started=started))
    (repository / "hangs" / "config.pbtxt").write_text(f'backend: "python" {TENSORS}')
    steps = [("hangs", "x=a", "y=b")]
    ensemble_configs.write(repository, "above", ensemble_configs.config_of("a:FP32:4", "b:FP32:4", steps, 0))


def test_a_model_that_hangs_is_started_once_and_has_the_time_that_a_flag_says(tmp_path: Path) -> None:
    started = tmp_path / "started"
    write_hanging(tmp_path / "models", started)
    flags = [f"--cache-dir={tmp_path / 'cache'}", "--backend-config=python,stub-timeout-seconds=2"]
    command = [*GANGWAY, "check", str(tmp_path / "models"), "--json", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    reasons = {report["name"]: report["changes"][-1]["reason"] for report in json.loads(done.stdout)}
    assert reasons["hangs"].startswith("it is not initialised after 2 s")
    assert reasons["above"] == "ensemble above contains models that are not available: hangs"
    assert started.read_text() == "started\n" and done.returncode == 1


def test_a_setting_that_no_server_takes_is_an_error_of_usage(tmp_path: Path) -> None:
    command = [*GANGWAY, "check", str(tmp_path), "--backend-config=python,stub-timeout-seconds=soon"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "soon" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_it_its_server_ends_and_nothing_stays(tmp_path: Path, number: signal.Signals) -> None:
    started, scratch = tmp_path / "started", tmp_path / ("scratch" * 15)  # longer than a socket's path may be
    scratch.mkdir()
    write_hanging(tmp_path / "models", started)
    command = [*GANGWAY, "check", str(tmp_path / "models"), f"--cache-dir={tmp_path / 'cache'}"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}) as process:
        until(started.exists)
        pids = descendants_of(process.pid)
        assert pids
        assert list(scratch.iterdir())
        process.send_signal(number)
        status = process.wait(STOP_S)
    assert status == (-number if number is signal.SIGKILL else 128 + number)
    until(lambda: not alive(pids))
    assert not list(scratch.iterdir())


def _open_model(sizes: Sequence[str | int], *nodes: onnx.NodeProto) -> bytes:
    """A model from x to y, both of these sizes."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name in "xy")
    graph = helper.make_graph(nodes, "graph", [x], [y])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(made.SerializeToString())


OPEN_SIZES = {  # by name: a model, and what serves it in the end
    "any_length": (_open_model(["N", "length"], helper.make_node("Relu", ["x"], ["y"])), "kernels"),
    "mixes_rows": (_open_model(["N", 4], helper.make_node("Softmax", ["x"], ["y"], axis=0)), "kernels"),
    "no_kernel": (_open_model(["N", "length"], helper.make_node("RandomNormalLike", ["x"], ["y"])), "onnxruntime"),
}


def test_a_repository_and_its_files_have_the_same_engine(tmp_path: Path) -> None:
    for name, (content, _) in OPEN_SIZES.items():
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "1" / "model.onnx").write_bytes(content)

    def check(*flags: str) -> list[dict[str, Any]]:
        command = [*GANGWAY, "check", str(tmp_path / "models"), "--json", *flags]
        found: list[dict[str, Any]] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return found

    by_model = {each["name"]: each["served_by"] for each in check(f"--cache-dir={tmp_path / 'cache'}")}
    by_file = {Path(each["file"]).parts[-3]: each for each in check("--static")}
    for name, (_, engine) in OPEN_SIZES.items():
        assert by_file[name]["served_by"] == engine
        if engine == "onnxruntime":
            assert by_model[name] == f"served by onnxruntime: {by_file[name]['reason']}"
    assert by_model["any_length"].startswith("compiled, for each size of (length) that requests have")
    assert by_model["mixes_rows"].startswith("compiled, for each size of (N) that requests have")


def test_files_are_judged_as_a_server_takes_the_folder(tmp_path: Path) -> None:
    """Without folders beside them files are models; else each must lie in a folder of its own."""
    (tmp_path / "models").mkdir()
    contents = {"network": model(), "broken": b"no model", "empty": b""}
    for name, content in contents.items():
        (tmp_path / "models" / f"{name}.onnx").write_bytes(content)

    def check() -> tuple[int, dict[str, str]]:
        command = [*GANGWAY, "check", str(tmp_path / "models"), "--json", f"--cache-dir={tmp_path / 'cache'}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        return done.returncode, {report["name"]: report["verdict"] for report in json.loads(done.stdout)}

    assert check() == (1, {"network": MOVES, "broken": CANNOT, "empty": CANNOT})
    (tmp_path / "models" / "beside" / "1").mkdir(parents=True)
    (tmp_path / "models" / "beside" / "1" / "model.onnx").write_bytes(model())
    assert check() == (1, {"network": CHANGES, "broken": CANNOT, "empty": CANNOT, "beside": MOVES})
