"""`gangway place` with two real servers of one core behind a real router: the plan follows the load, no call fails."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton

from testing.fetch.haproxy import missing_haproxy
from testing.live_router import LiveRouter, live_router, server_flag
from testing.live_server import LiveServer, live_server
from testing.repository import GANGWAY
from testing.waiting import until
from tests.helpers.tiny_model import orders_of, save_served

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(missing_haproxy()), reason=missing_haproxy())]

CORES = sorted(os.sched_getaffinity(0))
TASK_US = 20  # a request takes 19 ms on a core
RATE_PER_S = 12
CONFIG = 'parameters { key: "qos_ms" value: { string_value: "28" } }'
FOLLOWS_WITHIN_S = 30
CALL_TIMEOUT_S = 20
WEIGHTS_BYTES = 32 << 20


@dataclass(frozen=True)
class Site:
    """Two servers with the models a and b, of which only the first has both, and a router."""

    first: LiveServer
    second: LiveServer
    router: LiveRouter

    @property
    def flags(self) -> list[str]:
        return [server_flag("first", self.first), server_flag("second", self.second)]

    def ready(self, server: LiveServer) -> set[str]:
        with triton.InferenceServerClient(server.url) as client:
            return {m.name for m in client.get_model_repository_index().models if m.state == "READY"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    for name in ("a", "b"):
        save_served(folder / "models", name, folder / "cache", CONFIG, more_weights=WEIGHTS_BYTES)
    common = [f"--cache-dir={folder / 'cache'}", "--model-control-mode=explicit"]
    both = ["--load-model=a", "--load-model=b"]
    with ExitStack() as stack:
        start = stack.enter_context
        first = start(live_server(folder / "models", [*common, *both, f"--cores={CORES[0]}"]))
        second = start(live_server(folder / "models", [*common, f"--cores={CORES[-1]}"]))
        router = start(live_router(folder, [server_flag("first", first), server_flag("second", second)]))
        yield Site(first, second, router)


@dataclass
class Load:
    """Requests at a fixed rate for one model at a time."""

    model: str
    sent: int = 0
    answered: int = 0
    errors: list[str] = field(default_factory=list)


@contextmanager
def load(router: LiveRouter, model: str) -> Iterator[Load]:
    state, ending = Load(model), threading.Event()
    orders = orders_of(task_us=TASK_US)
    tensor = triton.InferInput("orders", orders.shape, "INT32").set_data_from_numpy(orders)

    def answered(result: Any, error: Any) -> None:
        state.errors += [str(error)] if error else []
        state.answered += 1

    def send() -> None:
        with triton.InferenceServerClient(router.url) as client:
            while not ending.wait(1 / RATE_PER_S):
                client.async_infer(state.model, [tensor], answered, client_timeout=CALL_TIMEOUT_S)
                state.sent += 1
            until(lambda: state.answered == state.sent)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield state
    finally:
        ending.set()
        thread.join()


def place(*flags: str, timeout: float = 60) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*GANGWAY, "place", *flags], capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip


def test_models_follow_the_load_and_no_call_fails(site: Site, tmp_path: Path) -> None:
    gib = WEIGHTS_BYTES / (1 << 30)
    memory = [f"--memory-gib=first={2.8 * gib}", f"--memory-gib=second={1.8 * gib}"]  # activations take some, too
    flags = [*site.flags, *memory, f"--route={site.router.folder}", f"--cache-dir={tmp_path}"]
    with load(site.router, "a") as calls:
        plan = place(*flags, "--dry-run", "--window=3")
        assert plan.returncode == 0, plan.stderr
        assert "+second" in plan.stdout, plan.stdout
        assert site.ready(site.second) == set()  # a dry run changes nothing
        log = tmp_path / "place.log"
        with (
            log.open("wb") as file,
            subprocess.Popen(
                [*GANGWAY, "place", *flags, "--every=3"], stdout=file, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                until(lambda: site.ready(site.second) == {"a"}, log.read_text, FOLLOWS_WITHIN_S)
                assert site.ready(site.first) == {"a", "b"}
                calls.model = "b"
                until(lambda: site.ready(site.second) == {"b"}, log.read_text, FOLLOWS_WITHIN_S)
            finally:
                process.send_signal(signal.SIGTERM)
        assert process.returncode == 0, log.read_text()
    assert calls.sent > 3 * RATE_PER_S
    assert not calls.errors, log.read_text()
    assert max(map(len, plan.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--model=c"], 2, "--model c: no server has it; they have a, b"),
        (["--memory-gib=third=1"], 2, "--memory-gib third: there is no --server of this name"),
        (["--memory-gib=lots"], 2, "a number of GiB was expected"),
        (["--profile=/none.json"], 2, "/none.json"),
        (["--every=0"], 2, "a positive number of seconds"),
        (["--route=/none"], 1, "no router answers at /none/haproxy.sock"),
    ],
)
def test_what_cannot_be_placed(site: Site, tmp_path: Path, flags: list[str], status: int, message: str) -> None:
    done = place(*site.flags, f"--cache-dir={tmp_path}", "--window=0.1", *flags)
    assert done.returncode == status, done.stdout + done.stderr
    assert message in done.stderr


def test_servers_that_do_not_answer(site: Site, tmp_path: Path) -> None:
    common = (f"--cache-dir={tmp_path}", "--window=0.1", "--timeout=2", "--dry-run")
    done = place("--server=gone=127.0.0.1:1,1,1", *common)
    assert done.returncode == 3
    assert "no server answers:\n  gone: no metrics at http://127.0.0.1:1/metrics" in done.stderr
    done = place(site.flags[0], "--server=gone=127.0.0.1:1,1,1", *common)
    assert done.returncode == 0
    assert "warning: gone: no metrics" in done.stderr
