"""`is_ready` of model.py: it says whether the model is ready, to all clients that ask, and to nobody else."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gangway.protos import grpc_service_pb2 as pb
from tests.helpers.methods import METHOD_WAYS
from tests.helpers.python_models import ADD, four, write
from tests.helpers.served import Served, serving

COUNTS = """
    def is_ready(self):
        import time
        self.asked = getattr(self, "asked", 0) + 1
        time.sleep(0.2)
        return self.asked == 1
"""
BODIES = {
    "yes": ("def is_ready(self): return True", True),
    "no": ("def is_ready(self): return False", False),
    "coroutine": ("async def is_ready(self): return False", False),
    "raises": ("def is_ready(self): raise ValueError('no resource')", False),
    "no bool": ("def is_ready(self): return 1", False),
    "an attribute": ("is_ready = False", True),  # of the model's own
}
MODELS = {name.replace(" ", "_"): body for name, body in BODIES.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("models")
    for name, (body, _) in MODELS.items():
        write(repository, name, f"{ADD}\n    {body}\n")
    write(repository, "counts", ADD + COUNTS)
    with serving(repository) as server:
        yield server


Call = Callable[[pb.ModelReadyRequest], pb.ModelReadyResponse]


@pytest.fixture(params=METHOD_WAYS)
def call(served: Served, request: pytest.FixtureRequest) -> Call:
    return partial(METHOD_WAYS[request.param], served.server)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_says(served: Served, call: Call, name: str) -> None:
    _, is_ready = MODELS[name]
    for version in ("", "1"):
        assert call(pb.ModelReadyRequest(name=name, version=version)).ready == is_ready
    np.testing.assert_array_equal(served.infer(name, x=four(1))["y"], four(2))  # it is served nevertheless


def test_the_server_and_the_index_do_not_ask(served: Served) -> None:
    assert served.client.is_server_ready()
    index = served.client.get_model_repository_index().models
    assert {each.state for each in index} == {"READY"}


def test_an_error_is_in_the_log(served: Served) -> None:
    assert not served.client.is_model_ready("raises")
    served.wait_for("ValueError: no resource")


def test_who_asks_meanwhile_gets_the_same_answer(served: Served) -> None:
    ask = partial(METHOD_WAYS["gRPC"], served.server, pb.ModelReadyRequest(name="counts"))
    with ThreadPoolExecutor(4) as clients:
        answers = [each.result().ready for each in [clients.submit(ask) for _ in range(4)]]
    assert answers.count(True) >= 1
    assert not ask().ready  # which is the second time at least


@pytest.mark.long  # is_ready may take 5 s
def test_one_that_takes_too_long(tmp_path: Path) -> None:
    body = """
    def is_ready(self):
        import time
        time.sleep(1000)
"""
    write(tmp_path, "slow", ADD + body)
    with serving(tmp_path) as served:
        assert not served.client.is_model_ready("slow")
        served.wait_for("is_ready has not returned within 5 s")
        np.testing.assert_array_equal(served.infer("slow", x=four(1))["y"], four(2))
