"""`gangway serve --model-control-mode=explicit`: load, unload, reload, overrides, as Triton's clients ask for them."""

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import helper
from onnx.external_data_helper import set_external_data
from tritonclient.utils import InferenceServerException

from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import LiveServer, live_server
from testing.resources import resources_of
from tests.conftest import CompileKept
from tests.helpers.adder_models import TIMEOUT_S, Controlled, adder, fill_cache, flags, replace, write
from tests.helpers.onnx_networks import FOREIGN
from tests.helpers.stopped_workers import stopped_workers

REFUSED = "explicit model load / unload is not allowed if polling is enabled: start the server with"
NOT_POLLED = "failed to load '{}', failed to poll from model repository"
CONFIG = json.dumps({"max_batch_size": 2})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Controlled]:
    repository, second = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    write(repository, "first", 1)
    write(repository, "other", 2)
    whole = FOREIGN["topk_vector"]().save(repository / "whole" / "1" / "model.onnx")
    temporary = tmp_path_factory.mktemp("temporary")
    more = flags(
        fill_cache(tmp_path_factory.mktemp("compiled"), compile_kept, whole), second, "--model-control-mode=explicit"
    )
    patch = pytest.MonkeyPatch()
    patch.setenv("TMPDIR", str(temporary))  # of the server alone: this process knows its own already
    with (
        live_server(repository, [*more, "--load-model=first"]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        yield Controlled(server, client, repository, second, temporary)
    assert server.process.returncode == 0
    patch.undo()
    assert list(temporary.iterdir()) == []


@contextmanager
def refused(code: str, message: str) -> Iterator[None]:
    with pytest.raises(InferenceServerException) as raised:
        yield
    assert raised.value.status() == f"StatusCode.{code}"
    assert message in raised.value.message()


def test_only_what_was_asked_for_is_loaded(served: Controlled) -> None:
    index = served.index()
    assert index["first", "1"] == ("READY", "")
    assert index["other", ""] == ("", "")  # Triton's way of showing what nobody has asked for
    ready = served.client.get_model_repository_index().models
    assert served.client.is_server_ready() and served.client.is_model_ready("first")
    assert not served.client.is_model_ready("other")
    assert {"model_repository", "model_repository(unload_dependents)"} <= {
        *served.client.get_server_metadata().extensions
    }
    assert ready
    with refused("NOT_FOUND", "Request for unknown model: 'other' is not found"):
        served.added("other")


def test_load_and_unload(served: Controlled) -> None:
    for _ in range(2):
        served.client.load_model("other")
        assert served.client.is_model_ready("other") and served.added("other") == 2
        assert served.state("other") == ("READY", "")
        served.client.load_model("other")  # nothing has changed: nothing happens
        assert served.client.get_inference_statistics("other").model_stats[0].inference_count == 1
        served.client.unload_model("other", unload_dependents=True)
        assert not served.client.is_model_ready("other") and served.client.is_server_ready()
        served.wait_for_unloaded("other")
        with refused("NOT_FOUND", "'other' has no available versions"):
            served.added("other")
        with refused("UNAVAILABLE", "'other' version 1 is not at ready state"):
            served.added("other", "1")
    served.client.unload_model("other")
    served.client.unload_model("never_heard_of")


def test_what_cannot_be_loaded(served: Controlled) -> None:
    with refused("INTERNAL", f"{NOT_POLLED.format('wrong_model_name')}: no repository has a folder of this name"):
        served.client.load_model("wrong_model_name")
    write(served.repository, "twin", 1)
    write(served.second, "twin", 2)
    with refused("INTERNAL", "model appears in two or more repositories"):
        served.client.load_model("twin")
    assert served.state("twin", "") == ("UNAVAILABLE", "model appears in two or more repositories")
    write(served.second, "contradictory", 1, config='input { name: "z" }')
    with refused("INVALID_ARGUMENT", "load failed for model 'contradictory': version 1 is at UNAVAILABLE state: input"):
        served.client.load_model("contradictory")
    assert "input 'z' is not in the ONNX model" in served.state("contradictory")[1]
    assert not served.client.is_server_ready()
    served.client.unload_model("contradictory")
    assert served.client.is_server_ready()
    write(served.second, "contradictory", 1, config="")
    served.client.load_model("contradictory")
    assert served.added("contradictory") == 1
    served.client.unload_model("contradictory")


class Stream(threading.Thread):
    """Asks a model as fast as it answers."""

    def __init__(self, served: Controlled, name: str) -> None:
        super().__init__()
        self._served, self._name = served, name
        self.seen: list[float] = []
        self.error: Exception | None = None
        self.stopping = False

    def run(self) -> None:
        try:
            while not self.stopping:
                self.seen.append(self._served.added(self._name))
        except Exception as error:
            self.error = error


def test_reload_under_load_drops_no_request(served: Controlled) -> None:
    write(served.repository, "changing", 1)
    served.client.load_model("changing")
    streams = [Stream(served, "changing") for _ in range(2)]
    for stream in streams:
        stream.start()
    for number in (2, 3, 1):
        write(served.repository, "changing", number)
        served.client.load_model("changing")
        assert served.added("changing") == number
        served.wait_until(lambda number=number: all(stream.seen[-1:] == [number] for stream in streams))
    for stream in streams:
        stream.stopping = True
        stream.join(TIMEOUT_S)
    for stream in streams:
        assert stream.error is None
        changes = [number for i, number in enumerate(stream.seen) if i == 0 or stream.seen[i - 1] != number]
        assert changes == [1, 2, 3, 1]
    served.wait_until(
        lambda: served.server.log.read_text().count("changing, version 1: the previous files are unloaded") == 3
    )
    served.client.unload_model("changing")


def test_a_reload_that_fails_leaves_what_there_is(served: Controlled) -> None:
    model = write(served.repository, "steady", 1)
    served.client.load_model("steady")
    replace(model / "config.pbtxt", b"max_batch_size: 8 nonsense")
    with refused("INVALID_ARGUMENT", "load failed for model 'steady': config.pbtxt: line 1, column 19: "):
        served.client.load_model("steady")
    replace(model / "config.pbtxt", b'default_model_filename: "absent.onnx"')
    with refused("INVALID_ARGUMENT", "there is no 1/absent.onnx"):
        served.client.load_model("steady")
    assert served.added("steady") == 1 and served.client.is_server_ready()
    assert served.state("steady") == ("READY", "")
    served.client.unload_model("steady")


def test_versions_come_and_go(served: Controlled) -> None:
    model = write(served.repository, "versions", 1, config="version_policy { all {} }")
    served.client.load_model("versions")
    write(served.repository, "versions", 2, version=2)
    served.client.load_model("versions")
    assert (served.added("versions"), served.added("versions", "1"), served.added("versions", "2")) == (2, 1, 2)
    assert served.client.get_model_metadata("versions").versions == ["1", "2"]
    replace(model / "config.pbtxt", b"version_policy { specific { versions: [1] } }")
    served.client.load_model("versions")
    assert served.added("versions") == 1
    served.wait_for_unloaded("versions", "2")
    replace(model / "config.pbtxt", b"")  # the latest
    served.client.load_model("versions")
    assert served.added("versions") == 2
    served.client.unload_model("versions")


def test_another_configuration(served: Controlled) -> None:
    served.client.load_model("other", config=CONFIG)
    assert served.client.get_model_config("other", as_json=True)["config"]["max_batch_size"] == 2
    assert served.added("other", rows=2) == 2
    with refused("INVALID_ARGUMENT", "batch-size must be <= 2"):
        served.added("other", rows=3)
    with refused("INVALID_ARGUMENT", "'config' is no model configuration in JSON"):
        served.client.load_model("other", config='{"max_batch_sighs": 2}')
    with refused("INVALID_ARGUMENT", "max_batch_size is -1"):
        served.client.load_model("other", config='{"max_batch_size": -1}')
    assert served.added("other", rows=2) == 2
    served.client.load_model("other")  # that of the repository again
    assert served.added("other", rows=3) == 2
    served.client.unload_model("other")


def test_files_in_the_request(served: Controlled) -> None:
    files = {"file:1/model.onnx": adder(3), "file:7/model.onnx": adder(2), "file:notes/a/b.txt": bytes(200_000)}
    every = json.dumps({"version_policy": {"all": {}}})
    served.client.load_model("uploaded", config=every, files=files)
    assert (served.added("uploaded", "1"), served.added("uploaded")) == (3, 2)
    (folder,) = served.uploads()
    assert (folder / "notes" / "a" / "b.txt").stat().st_size == 200_000
    served.client.load_model("uploaded", config="{}", files={"file:1/model.onnx": adder(1)})
    assert served.added("uploaded") == 1
    served.wait_until(lambda: len(served.uploads()) == 1 and not folder.exists())
    served.client.unload_model("uploaded")
    served.wait_until(lambda: not served.uploads() and ("uploaded", "1") not in served.index())


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        (None, {"file:1/model.onnx": b""}, "'config' must be specified for model file override"),
        ("{}", {"file:../model.onnx": b"x"}, "must stay within model directory"),
        ("{}", {"file:1/../../../etc/model.onnx": b"x"}, "must stay within model directory"),
        ("{}", {"file:": b"x"}, "must stay within model directory"),
        ("{}", {"file:1": b"x", "file:1/model.onnx": b"x"}, "Invalid file parameter 'file:1"),
        ("{}", {f"file:1/{'x' * 300}": b"x"}, "Invalid file parameter"),
        ("{}", {"file:readme": b"x"}, "there is no version folder"),
        ("{}", {"file:1/model.onnx": b"no model"}, "load failed for model 'hostile': version 1"),
        ("[" * 100_000, {"file:1/model.onnx": b"x"}, "no model configuration"),
        ('{"input": [{"name": "x", "data_type": 99}]}', {"file:1/model.onnx": adder(1)}, "load failed"),
    ],
)
def test_files_that_cannot_be(served: Controlled, config: str | None, files: dict[str, bytes], message: str) -> None:
    with refused("INTERNAL" if message.startswith("Invalid file") else "INVALID_ARGUMENT", message):
        served.client.load_model("hostile", config=config, files=files)
    assert served.uploads() == []
    assert not [key for key in served.index() if key[0] == "hostile"]
    assert served.client.is_server_ready()


@pytest.mark.parametrize("kind", ["initializer", "constant", "pipe", "cut off"])
def test_models_that_name_other_files(served: Controlled, tmp_path: Path, kind: str) -> None:
    """The file is one of this test, and stays closed."""
    other = tmp_path / "other"
    os.mkfifo(other) if kind == "pipe" else other.write_bytes(bytes(16))
    model = onnx.ModelProto.FromString(adder(1))
    (tensor,) = model.graph.initializer
    set_external_data(tensor, str(other), 0, 16)
    tensor.ClearField("raw_data")
    if kind == "constant":
        model.graph.node.insert(0, helper.make_node("Constant", [], ["number"], value=tensor))
        del model.graph.initializer[:]
    content = model.SerializeToString()[: -1 if kind == "cut off" else None]
    why = {"constant": "no initializer of a graph", "cut off": "it is truncated"}.get(kind, "leaves the model's folder")
    for config in ("{}", '{"backend": "onnxruntime"}'):
        with refused("INVALID_ARGUMENT", why):
            served.client.load_model("hostile", config=config, files={"file:1/model.onnx": content})
    assert served.uploads() == []


def test_parameters_of_the_wrong_type(served: Controlled) -> None:
    wrong = {
        "config": pb.ModelRepositoryParameter(int64_param=1),
        "file:1/model.onnx": pb.ModelRepositoryParameter(string_param="x"),
        "speed": pb.ModelRepositoryParameter(bool_param=True),
        "gangway_wait": pb.ModelRepositoryParameter(string_param="false"),
    }
    for name, parameter in wrong.items():
        request = pb.RepositoryModelLoadRequest(model_name="first", parameters={name: parameter})
        if name.startswith("file"):
            request.parameters["config"].string_param = "{}"
        assert status_of(served.server, "RepositoryModelLoad", request) is grpc.StatusCode.INVALID_ARGUMENT
    unload = pb.RepositoryModelUnloadRequest(model_name="first")
    unload.parameters["unload_dependents"].string_param = "yes"
    assert status_of(served.server, "RepositoryModelUnload", unload) is grpc.StatusCode.INVALID_ARGUMENT
    for name in ("", " ", "a/b", "..", ".", ".hidden", " ..", "../a", "a\0b", "x" * 2000):
        load = pb.RepositoryModelLoadRequest(model_name=name)
        assert status_of(served.server, "RepositoryModelLoad", load) is grpc.StatusCode.INVALID_ARGUMENT
        load.parameters["config"].string_param = "{}"
        load.parameters["file:1/model.onnx"].bytes_param = adder(1)
        assert status_of(served.server, "RepositoryModelLoad", load) is grpc.StatusCode.INVALID_ARGUMENT
    assert served.uploads() == []
    elsewhere = pb.RepositoryModelLoadRequest(repository_name="r", model_name="first")
    assert status_of(served.server, "RepositoryModelLoad", elsewhere) is grpc.StatusCode.UNIMPLEMENTED
    assert served.added("first") == 1


def status_of(server: LiveServer, method: str, request: pb.RepositoryModelLoadRequest) -> grpc.StatusCode:
    with grpc.insecure_channel(server.url) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(SERVICE + method)(request.SerializeToString(), timeout=TIMEOUT_S)
    code: grpc.StatusCode = raised.value.code()
    return code


WARM_UP = """model_warmup { name: "%s" batch_size: 1 count: %d
    inputs { key: "x" value { data_type: TYPE_FP32 dims: %d %s } } }"""


@pytest.mark.parametrize("protocol", ["gRPC", "HTTP"])
def test_a_load_that_nobody_waits_for(served: Controlled, protocol: str) -> None:
    """Its answer says nothing of the end, which the index and the log tell."""

    def load(name: str) -> None:
        if protocol == "HTTP":
            url = f"http://{served.server.http_url}/v2/repository/models/{name}/load"
            body = json.dumps({"parameters": {"gangway_wait": False}}).encode()
            urllib.request.urlopen(urllib.request.Request(url, body), timeout=TIMEOUT_S).read()
        else:
            request = pb.RepositoryModelLoadRequest(model_name=name)
            request.parameters["gangway_wait"].bool_param = False
            with grpc.insecure_channel(served.server.url) as channel:
                channel.unary_unary(SERVICE + "RepositoryModelLoad")(request.SerializeToString(), timeout=TIMEOUT_S)

    name = f"unawaited{protocol}"
    write(served.repository, name, 3)
    load(name)
    served.wait_until(lambda: served.state(name) == ("READY", ""))
    assert served.added(name) == 3
    (served.repository / name / "1" / "model.onnx").write_bytes(b"no model")
    served.client.unload_model(name)
    served.wait_for_unloaded(name)
    load(name)
    served.wait_until(lambda: served.state(name)[0] == "UNAVAILABLE" and served.state(name)[1] != "unloaded")
    served.wait_until(
        lambda: f"a load that no client waits for: load failed for model '{name}'" in served.server.log.read_text()
    )
    with pytest.raises((grpc.RpcError, urllib.error.HTTPError)) as refusal:  # which no index would tell
        load("nobody")
    told = refusal.value.read().decode() if isinstance(refusal.value, urllib.error.HTTPError) else str(refusal.value)
    assert "no repository has a folder of this name" in told


def test_warm_up_comes_before_ready(served: Controlled) -> None:
    config = "max_batch_size: 4 " + WARM_UP % ("ones", 3, 4, 'input_data_file: "ones.bin"')
    model = write(served.repository, "warm", 1, config=config)
    with refused("INVALID_ARGUMENT", "input_data_file 'ones.bin' cannot be read"):
        served.client.load_model("warm")
    (model / "warmup").mkdir()
    replace(model / "warmup" / "ones.bin", bytes(12))
    with refused("INVALID_ARGUMENT", "model_warmup 'ones': input byte size mismatch"):
        served.client.load_model("warm")
    assert not served.client.is_model_ready("warm")
    replace(model / "warmup" / "ones.bin", bytes(16))
    served.client.load_model("warm")
    assert served.client.get_inference_statistics("warm").model_stats[0].inference_count == 0
    assert served.added("warm") == 1
    write(served.repository, "warm", 1, config="max_batch_size: 4 " + WARM_UP % ("wide", 1, 5, "random_data: true"))
    with refused("INVALID_ARGUMENT", "model_warmup 'wide': unexpected shape for input 'x'"):
        served.client.load_model("warm")
    assert served.added("warm") == 1
    served.client.unload_model("warm")


def test_a_front_end_that_dies_during_a_load(served: Controlled) -> None:
    write(served.repository, "slow", 1, config="max_batch_size: 4 " + WARM_UP % ("long", 3, 4, "zero_data: true"))
    errors: list[Exception] = []

    def load() -> None:
        try:
            triton.InferenceServerClient(served.server.url).load_model("slow")
        except InferenceServerException as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    with stopped_workers(served.server):  # so that it cannot be loaded before
        thread.start()
        served.wait_until(lambda: served.state("slow")[0] == "LOADING")
        (front_end,) = served.server.pids()["front end"]
        os.kill(front_end, signal.SIGKILL)
        thread.join(TIMEOUT_S)
    assert len(errors) == 1
    served.wait_until(lambda: is_ready(served, "slow"))
    assert (served.added("slow"), served.added("first")) == (1, 1)
    served.client.unload_model("slow")
    served.wait_for_unloaded("slow")


def is_ready(served: Controlled, name: str) -> bool:
    try:
        return bool(served.client.is_model_ready(name))
    except InferenceServerException:  # the front end's successor is not there yet
        return False


def test_unloading_gives_everything_back(served: Controlled) -> None:
    cycle(served)
    before = resources_of(served.server)
    for _ in range(3):
        cycle(served)
    after = resources_of(served.server)
    assert after.descriptors == before.descriptors
    assert after.shared_bytes == before.shared_bytes
    assert after.mappings <= before.mappings
    assert after.private_bytes < before.private_bytes + 2e6


def cycle(served: Controlled) -> None:
    for name in ("other", "whole"):
        served.client.load_model(name)
        served.client.unload_model(name)
        served.wait_for_unloaded(name)


def test_a_repository_that_cannot_be_listed(served: Controlled, tmp_path: Path) -> None:
    """As while a volume is mounted again. Nothing is a fault of the server, and all goes on when it is back."""
    away = served.second.rename(tmp_path / "away")
    try:
        with refused("UNAVAILABLE", f"{NOT_POLLED.format('other')}: [Errno 2] No such file or directory"):
            served.client.load_model("other")
        assert served.state("first") == ("READY", "") and served.added("first") == 1
    finally:
        away.rename(served.second)
    served.client.load_model("other")
    assert served.added("other") == 2
    served.client.unload_model("other")


def test_other_modes_refuse(gangway_server: LiveServer) -> None:
    with triton.InferenceServerClient(gangway_server.url) as client:
        for ask in (client.load_model, client.unload_model):
            with refused("UNAVAILABLE", REFUSED):
                ask("mlp")
        assert client.is_model_ready("mlp")
