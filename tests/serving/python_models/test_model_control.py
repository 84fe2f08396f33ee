"""Models that load and unload other models: in execute, in initialize, and what is refused."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.live_server import live_server
from testing.waiting import until
from tests.helpers import adder_models
from tests.helpers.own_time import OwnTime
from tests.helpers.python_models import ADD, TEXTS, config_of, executes, four, write
from tests.helpers.served import Served, inputs_of, serving

pytestmark = pytest.mark.long

ASK = """
        def ask(name, shape=(4,)):
            x = pb_utils.Tensor("x", np.zeros(shape, np.float32))
            response = pb_utils.InferenceRequest(model_name=name, inputs=[x], requested_output_names=["y"]).exec()
            if response.has_error():
                return response.error().message()
            return float(response.output_tensors()[0].as_numpy().ravel()[0])
"""
EXECUTES = executes('"ask": ask', ASK)


def loads(*names: str) -> str:
    """A model that needs others, and says in the log what it has found."""
    calls = [f"        print('{name} was', pb_utils.is_model_ready('{name}'))\n" for name in names]
    calls += [f"        pb_utils.load_model('{name}')\n" for name in names]
    return "    def initialize(self, args):\n" + "".join(calls) + ADD


WHOLE = """
    platform: "ensemble"
    input { name: "x" data_type: TYPE_FP32 dims: 4 }
    output { name: "y" data_type: TYPE_FP32 dims: 4 }
    ensemble_scheduling {
      step {
        model_name: "member" model_version: -1
        input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
      }
    }
"""
READS = """
    def initialize(self, args):
        from pathlib import Path
        self.add = float(Path(args["model_repository"], "../../weights").read_text())
""" + ADD.replace("np.float32(1)", "np.float32(self.add)")
SLOW = "    def initialize(self, args):\n        import time\n        time.sleep(1.5)\n" + ADD


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    for name in ("asks", "asks_too", "leaves"):
        write(repository, name, EXECUTES, config_of(*TEXTS))
    for name in ("add", "other"):
        write(repository, name)
    write(repository, "slow", SLOW)
    write(repository, "reads", READS)
    write(repository, "needs", loads("other", "two"))
    write(repository, "itself", loads("itself"))
    write(repository, "first", loads("second"))
    write(repository, "second", loads("third"))
    write(repository, "third", loads("first"))
    adder_models.write(repository, "two", 2)
    write(repository, "member", loads("whole"))
    (repository / "whole" / "1").mkdir(parents=True)
    (repository / "whole" / "config.pbtxt").write_text(WHOLE)
    flags = ["--model-control-mode=explicit", "--front-ends=2"]
    flags += [f"--load-model={name}" for name in ("asks", "asks_too", "leaves", "other")] + ["--cores=0"]
    with serving(repository, *flags, cwd=repository.parent) as served:
        yield served


def ask(served: Served, code: str, name: str = "asks") -> str:
    """What a model answers that executes this."""
    return served.executed(name, code)


def test_a_model_is_there_as_soon_as_it_is_loaded(served: Served) -> None:
    code = """
found = [pb.is_model_ready("add")]
for _ in range(10):
    pb.load_model("add")
    found += [pb.is_model_ready("add"), pb.is_model_ready("add", "1"), pb.is_model_ready("add", "2"), ask("add")]
    pb.unload_model("add")
    found += [pb.is_model_ready("add"), isinstance(ask("add"), str)]
"""
    assert ask(served, code) == str([False, *([True, True, False, 1.0, False, True] * 10)])


def test_a_configuration_and_files_come_along(served: Served) -> None:
    content = (served.repository / "two" / "1" / "model.onnx").read_bytes()
    config = '{"max_batch_size": 2, "parameters": {"mine": {"string_value": "text"}}}'
    code = f"pb.load_model('brought', {config!r}, {{'file:1/model.onnx': {content!r}}}); found = ask('brought', (1, 4))"
    assert ask(served, code) == "2.0"
    told = served.client.get_model_config("brought").config
    assert (told.max_batch_size, told.parameters["mine"].string_value) == (2, "text")
    assert ask(served, "pb.unload_model('brought', unload_dependents=True); found = ask('brought')") != "2.0"


def test_initialize_loads_what_a_model_needs(served: Served) -> None:
    served.client.load_model("needs")
    assert served.client.is_model_ready("two")
    assert np.array_equal(served.infer("needs", x=four(1))["y"], four(2))
    until(lambda: "other was True" in served.log())
    assert "two was False" in served.log()


@pytest.mark.parametrize("name", ["itself", "first", "member"])
def test_loads_that_would_wait_for_each_other_end(served: Served, name: str) -> None:
    with pytest.raises(InferenceServerException, match=r"is being loaded, and '.*' would wait for it"):
        served.client.load_model(name)
    assert not served.client.is_model_ready(name)


def test_others_use_the_core_while_a_model_waits_for_a_load(served: Served) -> None:
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(ask, served, "pb.load_model('slow'); found = ask('slow')")
        count, own_time = 0, OwnTime()
        while not load.done():
            begin_s = time.monotonic()
            assert np.array_equal(served.infer("other", x=four(1))["y"], four(2))
            own_time.waited(begin_s)
            count += 1
        assert load.result() == "1.0"
    assert count > 10
    assert own_time.longest_s < 1
    ask(served, "pb.unload_model('slow')")


@pytest.mark.parametrize("by", ["a client", "a model"])
def test_a_load_initialises_a_model_anew_that_has_not_changed(served: Served, by: str) -> None:
    """What `initialize` has read elsewhere may be another: weights that lie outside of the repository."""
    weights = served.repository.parent / "weights"
    weights.write_text("1")
    served.client.load_model("reads")
    assert np.array_equal(served.infer("reads", x=four(0))["y"], four(1))
    weights.write_text("5")
    assert np.array_equal(served.infer("reads", x=four(0))["y"], four(1))
    (before,) = served.instances("reads")
    ways: dict[str, Callable[[], object]] = {
        "a client": partial(served.client.load_model, "reads"),
        "a model": partial(ask, served, "pb.load_model('reads')"),
    }
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(ways[by])
        while not load.done():
            assert served.infer("reads", x=four(0))["y"][0] in (1, 5)
        load.result()
    assert np.array_equal(served.infer("reads", x=four(0))["y"], four(5))
    until(lambda: before not in served.instances("reads"))
    served.client.unload_model("reads")


def test_a_model_can_unload_itself(served: Served) -> None:
    assert ask(served, "pb.unload_model('leaves'); found = pb.is_model_ready('leaves')", "leaves") == "False"
    until(lambda: not served.instances("leaves"))
    assert not served.client.is_model_ready("leaves")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("pb.load_model('no_such_model')", "Failed to load model: failed to load 'no_such_model'"),
        ("pb.load_model('add', 'no json')", "Failed to load model: .*is no model configuration in JSON"),
        ("pb.load_model('add', '{}', ['a'])", "files should be a dictionary"),
        ("pb.load_model('add', '{}', {'file:1/model.onnx': 'text'})", "expected bytes, got str"),
        ("pb.load_model('add', '{}', {'1/model.onnx': b'x'})", "unrecognized load parameter '1/model.onnx'"),
        ("pb.load_model('add', '', {'file:1/model.onnx': b'x'})", "'config' must be specified"),
        ("pb.load_model('new', '{\"backend\": \"python\"}', {'file:1/model.py': b'x'})", "cannot come with a load"),
        ("pb.load_model(7)", "expected a text, got int"),
        ("pb.is_model_ready('add', 'x')", "version should be an integral value > 0"),
        ("pb.is_model_ready('add', '-1')", "version should be an integral value > 0"),
    ],
)
def test_what_is_refused(served: Served, code: str, why: str) -> None:
    with pytest.raises(InferenceServerException, match=why):
        ask(served, code)
    assert ask(served, "found = pb.is_model_ready('no_such_model')") == "False"


def test_a_load_goes_on_without_the_process_that_asked(served: Served) -> None:
    (pid,) = served.instances("asks_too")
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(ask, served, "pb.load_model('slow')", "asks_too")
        until(lambda: served.instances("slow"))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InferenceServerException):
            load.result()
    until(lambda: served.client.is_model_ready("slow"))
    served.client.unload_model("slow")


def test_other_modes_of_control_refuse_it(tmp_path: Path) -> None:
    write(tmp_path / "models", "asks", EXECUTES, config_of(*TEXTS))
    write(tmp_path / "models", "add")
    with (
        live_server(tmp_path / "models", [f"--cache-dir={tmp_path / 'cache'}"]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        served = Served(server, client, tmp_path / "models")
        for call in ("load_model", "unload_model"):
            with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed"):
                ask(served, f"pb.{call}('add')")
        assert ask(served, "found = pb.is_model_ready('add')") == "True"
        assert client.infer("add", inputs_of({"x": four(1)})).as_numpy("y")[0] == 2
