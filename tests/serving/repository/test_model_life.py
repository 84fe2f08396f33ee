"""The life of a model's version on real servers: each transition of the table at least twice, and no other one."""

import json
import os
import re
import shutil
import signal
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.server.control.supervisor.model_life import TRANSITIONS
from testing.live_server import live_server
from tests.conftest import CompileKept
from tests.helpers import adder_models, ensemble_configs, python_models
from tests.helpers.adder_models import TIMEOUT_S, Controlled, fill_cache
from tests.helpers.python_models import ADD, config_of, four
from tests.helpers.scraped_metrics import Scraped
from tests.helpers.served import inputs_of

LINE = re.compile(r"model \S+?(?:, version \d+)?: (\w+) -> (\w+): ")
FAULT = "is a fault of the server"
# Requests of less than eight rows wait in the queue, where they keep no worker from loading models.
WAITS = "dynamic_batching { preferred_batch_size: [8] max_queue_delay_microseconds: 600000000 }"
FAILS = """
    def initialize(self, args):
        raise ValueError("{reason}")
"""
SLOW = """
    def initialize(self, args):
        import os, time
        while not os.path.exists("{gate}"):
            time.sleep(0.01)
"""
ALL = "version_policy { all {} }"


class Walk:
    """A server and what its models go through."""

    def __init__(self, controlled: Controlled) -> None:
        self.controlled = controlled
        self.client, self.repository = controlled.client, controlled.repository
        self._scraped = Scraped(controlled.server)

    def edges(self) -> Counter[tuple[str, str]]:
        return Counter(LINE.findall(self.controlled.server.log.read_text()))

    def write(self, name: str, body: str = ADD, config: str | None = None, version: int = 1) -> None:
        """Write a version of a Python model, with another file each time."""
        python_models.write(self.repository, name, body, config)
        if version != 1:
            shutil.rmtree(self.repository / name / str(version), ignore_errors=True)
            (self.repository / name / "1").rename(self.repository / name / str(version))

    def load(self, name: str) -> str:
        """Load a model; return why it cannot be, empty if it can."""
        try:
            self.client.load_model(name)
        except InferenceServerException as error:
            return str(error.message())
        return ""

    def is_state(self, name: str, state: str, reason: str = "", version: str = "1") -> None:
        """Check what every interface says of a version: index by gRPC and HTTP, readiness, metrics."""
        known = self.controlled.state(name, version)
        assert known[0] == state and reason in known[1], known
        body = urllib.request.Request(f"http://{self.controlled.server.http_url}/v2/repository/index", b"{}")
        with urllib.request.urlopen(body, timeout=TIMEOUT_S) as answer:
            models = {(each["name"], each.get("version", "")): each for each in json.loads(answer.read())}
        by_http = models.get((name, version), {})
        assert (by_http.get("state", ""), by_http.get("reason", "")) == known
        ready = state == "READY"
        assert self.client.is_model_ready(name, version) is ready
        served = [
            dict(labels)
            for sample, labels in self._scraped.scrape().samples
            if sample == "nv_inference_request_success" and {("model", name), ("version", version)} <= set(labels)
        ]
        assert bool(served) is ready

    @contextmanager
    def request_under_way(self, name: str) -> Iterator[None]:
        """A request that has no answer until the block ends, when its client gives it up."""
        server = self.controlled.server
        self.controlled.wait_until(lambda: server.busy_slots() == 0)
        tensors = inputs_of({"x": np.ones((1, 4), np.float32)})
        call = self.client.async_infer(name, tensors, lambda result, error: None, client_timeout=TIMEOUT_S)
        self.controlled.wait_until(lambda: server.busy_slots() > 0)
        yield
        call.cancel()


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Path:
    return fill_cache(tmp_path_factory.mktemp("compiled"), compile_kept)


@contextmanager
def walked(folder: Path, cache_dir: Path, *flags: str) -> Iterator[Walk]:
    repository, second = folder / "one", folder / "two"
    repository.mkdir()
    second.mkdir()
    options = [*adder_models.flags(cache_dir, second, *flags), "--log-verbose=1", "--strict-readiness=false"]
    with live_server(repository, options) as server, triton.InferenceServerClient(server.url) as client:
        yield Walk(Controlled(server, client, repository, second, folder))
    assert server.process.returncode == 0


def fail_and_mend(walk: Walk, name: str) -> None:
    """Fail before and during a load, for the same reason and another one, then be mended, and unloaded."""
    walk.write(name, FAILS.format(reason="no weights"))
    assert walk.controlled.state(name, "") == ("", "")  # unknown
    for _ in range(3):
        assert "no weights" in walk.load(name)
        walk.is_state(name, "UNAVAILABLE", "no weights")
    walk.write(name, FAILS.format(reason="other weights"))
    assert "other weights" in walk.load(name)
    walk.is_state(name, "UNAVAILABLE", "other weights")
    walk.client.unload_model(name)
    walk.is_state(name, "UNAVAILABLE", "unloaded")
    assert "other weights" in walk.load(name)
    walk.write(name, ADD)
    assert not walk.load(name)
    walk.is_state(name, "READY")
    walk.write(name, FAILS.format(reason="no reload"))
    for _ in range(2):
        assert "no reload" in walk.load(name)
        walk.is_state(name, "READY")
    walk.write(name, ADD + "\n    # again\n")
    assert not walk.load(name)
    walk.is_state(name, "READY")
    walk.client.unload_model(name)
    walk.controlled.wait_for_unloaded(name)
    walk.is_state(name, "UNAVAILABLE", "unloaded")
    (walk.repository / name / "1" / "model.py").unlink()
    assert "there is neither" in walk.load(name)
    walk.is_state(name, "UNAVAILABLE", "there is neither")


def go_and_come_back(walk: Walk, name: str) -> None:
    """Wrong files before anything is loaded, a folder that goes, and one that comes back."""
    walk.write(name, ADD, "nonsense")
    walk.is_state(name, "", "", "")
    assert "nonsense" in walk.load(name) or "no field" in walk.load(name)
    walk.is_state(name, "UNAVAILABLE", "config.pbtxt", "")
    walk.write(name, ADD, "max_batch_size: many")
    assert "config.pbtxt" in walk.load(name)
    walk.is_state(name, "UNAVAILABLE", "config.pbtxt", "")
    walk.write(name)
    assert not walk.load(name)
    walk.is_state(name, "READY")
    assert walk.controlled.state(name, "") == ("", "")
    walk.client.unload_model(name)
    walk.controlled.wait_for_unloaded(name)
    shutil.rmtree(walk.repository / name)
    assert walk.controlled.state(name) == ("", "")
    walk.write(name)
    assert walk.controlled.index()[name, ""] == ("", "")
    shutil.rmtree(walk.repository / name)
    assert (name, "") not in walk.controlled.index()


def never_asked_for(walk: Walk, name: str) -> None:
    """Fails at once, without an index that had it before."""
    walk.write(name, ADD, "nonsense")
    assert "config.pbtxt" in walk.load(name)
    walk.client.unload_model(name)
    walk.is_state(name, "UNAVAILABLE", "unloaded", "")
    shutil.rmtree(walk.repository / name)
    assert (name, "") not in walk.controlled.index()


def versions_together(walk: Walk, name: str) -> None:
    """Of several new versions none is served if one fails."""
    walk.write(name, ADD, f"{config_of()} {ALL}")
    assert not walk.load(name)
    walk.write(name, FAILS.format(reason="third"), f"{config_of()} {ALL}", 3)
    walk.write(name, ADD, f"{config_of()} {ALL}", 2)
    walk.write(name, ADD, f"{config_of()} {ALL}")
    for _ in range(2):
        assert "third" in walk.load(name)
        walk.is_state(name, "READY", version="1")
        walk.is_state(name, "UNAVAILABLE", "unloaded", version="2")
        walk.is_state(name, "UNAVAILABLE", "third", version="3")
    shutil.rmtree(walk.repository / name / "3")
    assert not walk.load(name)
    walk.is_state(name, "READY", version="2")
    assert walk.controlled.state(name, "3") == ("", "")
    shutil.rmtree(walk.repository / name / "1")
    assert not walk.load(name)
    walk.controlled.wait_for_unloaded(name, "1")
    walk.client.unload_model(name)


def busy_while_unloaded(walk: Walk, name: str) -> None:
    """Load, and fail to load, what still answers a request."""
    walk.write(name, ADD, config_of(batch=8, more=WAITS))
    assert not walk.load(name)
    with walk.request_under_way(name):
        walk.client.unload_model(name)
        walk.is_state(name, "UNLOADING")
        assert not walk.load(name)
        walk.is_state(name, "READY")
    with walk.request_under_way(name):
        walk.client.unload_model(name)
        walk.is_state(name, "UNLOADING")
        (walk.repository / name / "1" / "model.py").unlink()
        assert "there is neither" in walk.load(name)
        walk.is_state(name, "UNAVAILABLE", "there is neither")
    walk.controlled.wait_until(lambda: "version 1: is unloaded" in walk.controlled.server.log.read_text())
    walk.is_state(name, "UNAVAILABLE", "there is neither")


def ensembles_follow(walk: Walk, member: str, name: str) -> None:
    """An ensemble whose model goes, comes back with another type, and comes back as it was."""
    walk.write(member, ADD, config_of(batch=8, more=WAITS))
    steps = [(member, "x=x", "y=y")]
    ensemble_configs.write(walk.repository, name, ensemble_configs.config_of("x:FP32:4", "y:FP32:4", steps))
    assert not walk.load(name)
    with walk.request_under_way(name):
        walk.client.unload_model(member)
        walk.is_state(name, "UNLOADING")
        assert not walk.load(member)
        walk.is_state(name, "READY")
    walk.client.unload_model(member)
    walk.controlled.wait_until(lambda: "not available" in walk.controlled.state(name)[1])
    assert not walk.load(member)
    walk.is_state(name, "READY")
    walk.write(member, ADD, config_of("x:FP64:4", batch=8))
    assert not walk.load(member)
    walk.controlled.wait_until(lambda: "inconsistent data type" in walk.controlled.state(name)[1])
    for _ in range(2):
        assert "inconsistent" in walk.load(name)
        walk.is_state(name, "UNAVAILABLE", "inconsistent")
    walk.write(member, ADD, config_of(batch=8, more=WAITS))
    assert not walk.load(member)
    walk.is_state(name, "READY")
    walk.client.unload_model(member)
    walk.controlled.wait_until(lambda: "not available" in walk.controlled.state(name)[1])
    walk.client.unload_model(name)
    walk.is_state(name, "UNAVAILABLE", "unloaded")


def lost_by_workers(walk: Walk, cache_dir: Path) -> None:
    """No worker can load a model for a while."""
    adder_models.write(walk.repository, "lost", 1)
    assert not walk.load("lost")
    hidden = [path.parent.rename(path.parent.with_name(f"hidden-{path.parent.name}")) for path in artifacts(cache_dir)]
    for pid in walk.controlled.server.pids()["worker"]:
        os.kill(pid, signal.SIGKILL)
    walk.controlled.wait_until(lambda: walk.controlled.state("lost")[0] == "UNAVAILABLE")
    for folder in hidden:
        place = folder.with_name(folder.name.removeprefix("hidden-"))
        if place.exists():  # a compile job was quick
            shutil.rmtree(folder)
        else:
            folder.rename(place)
    walk.controlled.wait_until(lambda: walk.controlled.state("lost")[0] == "READY")
    assert walk.controlled.added("lost") == 1
    walk.is_state("lost", "READY")
    walk.client.unload_model("lost")
    walk.controlled.wait_for_unloaded("lost")


def artifacts(cache_dir: Path) -> list[Path]:
    return [path for path in cache_dir.glob("*/kernels.so") if not path.parent.name.startswith("hidden-")]


def polled(walk: Walk, name: str) -> None:
    """A repository that is followed: a model comes, fails twice for one reason, is mended, goes and comes back."""
    state, wait = walk.controlled.state, walk.controlled.wait_until
    for number in range(2):
        walk.write(name, FAILS.format(reason="no weights") + f"\n    # {number}\n")
        began = walk.controlled.server.log.read_text().count("no weights")
        wait(lambda began=began: walk.controlled.server.log.read_text().count("no weights") > began)
        wait(lambda: state(name)[0] == "UNAVAILABLE")
        walk.is_state(name, "UNAVAILABLE", "no weights")
    walk.write(name, ADD)
    wait(lambda: state(name)[0] == "READY")
    walk.is_state(name, "READY")
    shutil.rmtree(walk.repository / name)
    wait(lambda: not [key for key in walk.controlled.index() if key[0] == name])
    walk.write(name)
    wait(lambda: state(name)[0] == "READY")
    shutil.rmtree(walk.repository / name)
    wait(lambda: not [key for key in walk.controlled.index() if key[0] == name])


def appears_twice(walk: Walk, name: str) -> None:
    """A model that is in two repositories for a while."""
    walk.write(name)
    walk.controlled.wait_until(lambda: walk.controlled.state(name)[0] == "READY")
    shutil.copytree(walk.repository / name, walk.controlled.second / name)
    walk.controlled.wait_until(lambda: walk.controlled.state(name)[1] == "model appears in two or more repositories")
    assert not walk.client.is_model_ready(name)
    shutil.rmtree(walk.controlled.second / name)
    walk.controlled.wait_until(lambda: walk.controlled.state(name)[0] == "READY")
    shutil.rmtree(walk.repository / name)
    walk.controlled.wait_until(lambda: not [key for key in walk.controlled.index() if key[0] == name])


@pytest.mark.long
def test_every_transition_twice_and_no_other(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "explicit").mkdir()
    (tmp_path / "poll").mkdir()
    with walked(tmp_path / "explicit", cache_dir, "--model-control-mode=explicit") as walk:
        for number in range(2):
            fail_and_mend(walk, f"mended{number}")
            go_and_come_back(walk, f"gone{number}")
            never_asked_for(walk, f"never{number}")
            versions_together(walk, f"versions{number}")
            busy_while_unloaded(walk, f"busy{number}")
            ensembles_follow(walk, f"member{number}", f"pair{number}")
            lost_by_workers(walk, cache_dir)
        found = walk.edges()
        assert FAULT not in walk.controlled.server.log.read_text()
    flags = ("--model-control-mode=poll", "--repository-poll-secs=0.1")
    with walked(tmp_path / "poll", cache_dir, *flags) as walk:
        for number in range(2):
            polled(walk, f"polled{number}")
            appears_twice(walk, f"twin{number}")
        found += walk.edges()
        assert FAULT not in walk.controlled.server.log.read_text()
    table = {(before.value, after.value) for before, all_after in TRANSITIONS.items() for after in all_after}
    assert found.keys() == table
    assert {edge: times for edge, times in found.items() if times < 2} == {}


def test_a_client_that_gives_up_a_load_does_not_end_it(tmp_path: Path, cache_dir: Path) -> None:
    with walked(tmp_path, cache_dir, "--model-control-mode=explicit") as walk:
        gate = tmp_path / "initialised"
        slow = SLOW.format(gate=gate)
        for _ in range(2):
            gate.unlink(missing_ok=True)
            walk.write("slow", slow + ADD)
            with pytest.raises(InferenceServerException, match="Deadline"):
                walk.client.load_model("slow", client_timeout=0.5)
            walk.is_state("slow", "LOADING")
            unload = threading.Thread(target=walk.client.unload_model, args=("slow",))
            unload.start()
            gate.touch()
            unload.join(TIMEOUT_S)
            walk.controlled.wait_for_unloaded("slow")
            assert not walk.load("slow")
            assert walk.client.infer("slow", inputs_of({"x": four(1)})).as_numpy("y") == pytest.approx(np.full(4, 2))
            walk.client.unload_model("slow")
            walk.controlled.wait_for_unloaded("slow")
