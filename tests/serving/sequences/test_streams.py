"""Sequences in streams of a real server: cancelled, with killed processes, and with ids that look alike.

The last test kills the front end.
"""

import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import is_ready
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers import sequence_models
from tests.helpers.raw_stream import RawStream
from tests.helpers.sequence_models import TIMEOUT_S, Sums, config_of, oldest, run_stream
from tests.helpers.served import serving
from tests.helpers.stopped_workers import stopped_workers
from tests.serving.sequences.test_sequence_fuzz import request_of

COMPILED = {"sums": config_of(oldest(64)), "narrow": config_of("direct { }", batch=1)}
SPELLED = {"words": config_of(oldest(64))}
STEPS = 60


class Replaced(Sums):
    def replace(self, role: str) -> None:
        """Kill a process and wait until there is another one."""
        count, before = len(self.server.pids()[role]), self.kill(role)
        until(lambda: before not in (now := self.server.pids()[role]) and len(now) == count)


@pytest.fixture(scope="module")
def served(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replaced]:
    repository = tmp_path_factory.mktemp("models")
    sequence_models.save(repository, compiled_zoo.cache_dir, COMPILED, SPELLED)
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--model-control-mode=explicit", "--load-model=*"]
    with serving(repository, *flags, kind=Replaced) as served:
        yield served
        for name in (*COMPILED, *SPELLED):
            served.client.unload_model(name)  # which ends its sequences
        served.await_rest()


def value_of(model: str, value: int) -> int | str:
    return str(value) if model in SPELLED else value


def not_started(served: Replaced, model: str, identity: int | str) -> None:
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        served.add(model, identity, value_of(model, 1))


@pytest.mark.parametrize("model", ["sums", "words"])
def test_a_cancelled_stream_leaves_its_sequences_to_others(served: Replaced, model: str) -> None:
    """Each has one request with the workers, which may just be finished, and others behind it, which never begin."""
    identities = range(1, 5)
    send = partial(request_of, model)
    value = str if model in SPELLED else int
    for identity in identities:
        assert served.add(model, identity, value_of(model, 1), start=True) == 1
    with stopped_workers(served.server), RawStream(served.server.url) as stream:
        for amount in (10, 100, 1000):
            for identity in identities:
                stream.send(send(identity, value(amount), end=amount == 1000))
        until(lambda: served.server.busy_slots() == len(identities))
        stream.call.cancel()
        until(lambda: not served.server.wanted_slots())  # the server has heard of it
    until(lambda: not served.server.busy_slots())
    for identity in identities:
        assert served.add(model, identity, value_of(model, 1), end=True) in (2, 12)
        not_started(served, model, identity)


def test_what_waits_for_a_slot_when_its_stream_is_cancelled_never_begins(served: Replaced) -> None:
    assert served.add("narrow", 1, 1, start=True) == 1
    with RawStream(served.server.url) as stream:
        for identity in (2, 3):
            stream.send(request_of("narrow", identity, 5, start=True))
        stream.send(request_of("sums", 9, 5, start=True, end=True))
        assert stream.receive().infer_response.model_name == "sums"  # it has overtaken the others
    assert served.add("narrow", 1, 1, end=True) == 2
    assert served.add("narrow", 4, 7, start=True, end=True) == 7
    for identity in (2, 3):
        not_started(served, "narrow", identity)


def test_sequences_of_two_models_do_not_wait_for_each_other(served: Replaced) -> None:
    """Ids belong to a model: 5 of `narrow` has no slot, 5 of `sums` need not wait for that."""
    assert served.add("narrow", 1, 1, start=True) == 1
    with RawStream(served.server.url) as stream:
        stream.send(request_of("narrow", 5, 7, start=True, end=True))
        for value in (1, 2):
            stream.send(request_of("sums", 5, value, start=value == 1, end=value == 2))
        assert [total_in(stream.receive()) for _ in range(2)] == [1, 3]
        assert served.add("narrow", 1, 1, end=True) == 2
        assert total_in(stream.receive()) == 7


def test_an_id_may_be_written_in_two_ways(served: Replaced) -> None:
    """-2 as a signed number and 2^64 - 2 as an unsigned one are the same sequence, and keep their order."""
    with RawStream(served.server.url) as stream:
        for value in range(STEPS):
            request = request_of("sums", -2, value, start=not value, end=value == STEPS - 1)
            if value % 2:
                request.parameters["sequence_id"].uint64_param = 2**64 - 2
            stream.send(request)
        sums = [total_in(stream.receive()) for _ in range(STEPS)]
    assert sums == list(itertools.accumulate(range(STEPS)))


def total_in(response: pb.ModelStreamInferResponse) -> int:
    assert not response.error_message
    return int.from_bytes(response.infer_response.raw_output_contents[0], "little", signed=True)


def test_killed_processes_while_streams_run(served: Replaced) -> None:
    """A worker, the scheduler and the other worker; each executes again what was lost, from the same state."""
    values = list(range(STEPS))
    texts = [str(value) for value in values]
    url = served.server.url
    jobs: list[Callable[[], list[list[int]]]] = [
        partial(run_stream, url, "sums", range(10, 14), values),
        partial(run_stream, url, "sums", ["a", "10"], values),
        partial(run_stream, url, "words", [1, 2], texts),
        partial(run_stream, url, "narrow", [1], values),
        partial(run_stream, url, "narrow", [2], values),
    ]
    before = served.answered("sums")
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(job) for job in jobs]
        for kills, role in enumerate(("worker", "scheduler", "worker"), 1):
            until(lambda least=kills * STEPS: served.answered("sums") - before > least)  # type: ignore[misc]
            served.replace(role)
        answers = [sums for job in running for sums in job.result(TIMEOUT_S)]
    assert answers == [list(itertools.accumulate(values))] * 10
    assert served.answered("sums") - before == 6 * STEPS


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), TIMEOUT_S).close()
    except OSError:
        return False
    return True


def test_a_killed_front_end_takes_its_sequences_along(served: Replaced) -> None:
    """The stream breaks, the ids are free, and memory of states is whole again, as the end of the module looks at."""
    assert served.add("narrow", 1, 1, start=True) == 1
    (front_end,) = served.server.pids()["front end"]
    ended = threading.Event()

    def ask_on() -> None:
        with RawStream(served.server.url, timeout_s=TIMEOUT_S) as stream:
            try:
                for value in itertools.count():
                    stream.send(request_of("sums", 1, value, start=not value))
                    stream.receive()
            except Exception as error:
                assert "UNAVAILABLE" in str(error)
                ended.set()

    before = served.answered("sums")
    client: Any = threading.Thread(target=ask_on)
    client.start()
    until(lambda: served.answered("sums") > before + 5)
    os.kill(front_end, signal.SIGKILL)
    client.join(TIMEOUT_S)
    assert ended.is_set()
    until(lambda: served.server.pids()["front end"] not in ([], [front_end]) and is_ready(served.server.url))
    for name in ("sums", "narrow"):
        until(lambda name=name: served.client.is_model_ready(name))  # type: ignore[misc]
        not_started(served, name, 1)
    until(lambda: listens(served.server.metrics_url.split("/")[2]))  # which comes after gRPC
    assert served.add("narrow", 1, 4, start=True, end=True) == 4
