"""The response cache: what is found, what is forgotten, and what of it is counted."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.models.served import Models, ServedModel
from gangway.server.serving.inference.response_cache import ENTRY_BYTES, Key, ResponseCache, key_of
from gangway.server.statistics import CacheFigures
from tests.helpers.raw_stream import simple_request

Inputs = Callable[..., list[triton.InferInput]]
SIZE_BYTES = 10_000


def test_every_byte_of_a_request_counts() -> None:
    keys = [
        key_of(1, b"header", [b"one", b"two"]),
        key_of(2, b"header", [b"one", b"two"]),
        key_of(1, b"heade", [b"rone", b"two"]),
        key_of(1, b"header", [b"onet", b"wo"]),
        key_of(1, b"header", [b"one", b"twO"]),
        key_of(1, b"header", [b"one"]),
        key_of(1, b"header", [b"one", b"two", b""]),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key_of(1, b"header", [memoryview(b"one"), memoryview(b"two")])


def test_it_never_holds_more_than_its_size() -> None:
    cache = ResponseCache(4 * (ENTRY_BYTES + 100))
    keys = [Key(1, bytes([number]) * 32) for number in range(6)]
    for key in keys[:4]:
        cache.put(key, bytes(100))
    assert cache.get(keys[0]) == bytes(100)  # so it was used after the others
    cache.put(keys[4], bytes(100))
    assert cache.get(keys[1]) is None and cache.get(keys[0]) is not None
    assert cache.used_bytes == 4 * (ENTRY_BYTES + 100)
    cache.put(keys[5], bytes(4 * (ENTRY_BYTES + 100)))  # has no room at all
    assert cache.get(keys[5]) is None and cache.get(keys[0]) is not None


def test_a_model_that_is_gone_leaves_nothing() -> None:
    cache = ResponseCache(SIZE_BYTES)
    cache.put(Key(1, b"a"), b"first")
    cache.put(Key(2, b"a"), b"second")
    cache.keep({2, 3})
    assert cache.get(Key(1, b"a")) is None and cache.get(Key(2, b"a")) == b"second"
    assert cache.used_bytes == ENTRY_BYTES + 6


def test_what_it_does_is_counted_and_a_successor_counts_on() -> None:
    words = memoryview(bytearray(8 * len(CacheFigures._fields))).cast("Q")
    keys = [Key(1, bytes([number]) * 32) for number in range(4)]
    for count in (1, 2):
        cache = ResponseCache(3 * (ENTRY_BYTES + 100))
        cache.count_in(words)
        assert CacheFigures(*words)[1:3] == (0, 0)
        for key in (*keys, keys[-1]):  # the first one goes, the last one is there already
            cache.put(key, bytes(100))
        assert [cache.get(key) is None for key in keys] == [True, False, False, False]
        found = CacheFigures(*words)
        assert found[:3] == (3 * (ENTRY_BYTES + 100), 3 * (ENTRY_BYTES + 100), 3)
        assert (found.hits, found.misses, found.evictions) == (3 * count, count, count)
        assert found.lookup_ns > 0 and found.insertion_ns > 0
    cache.keep(set())
    assert CacheFigures(*words)[1:3] == (0, 0)


@pytest.fixture
def caching(server: Any) -> Iterator[Any]:
    """The server, whose model `simple` may be answered from a cache."""
    before, inference = server.front_end.models, server.front_end.inference
    config = before.find("simple", "").config
    config.response_cache.enable = True
    inference.cache = ResponseCache(SIZE_BYTES)
    inference.serve(before)
    yield server
    config.response_cache.enable = False
    inference.cache = None
    inference.serve(before)


def counted(server: Any) -> tuple[int, int, int, int, int]:
    (model,) = server.client.get_inference_statistics("simple").model_stats
    stats = model.inference_stats
    return (
        stats.cache_hit.count,
        stats.cache_miss.count,
        stats.success.count,
        model.execution_count,
        model.inference_count,
    )


def test_an_equal_request_is_not_executed_again(caching: Any, simple_inputs: Inputs) -> None:
    before = counted(caching)
    for number in range(3):
        result = caching.client.infer("simple", simple_inputs(2), request_id=f"id {number}")
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.arange(32).reshape(2, 16) + 1)
        assert result.get_response().id == f"id {number}"
    assert caching.client.infer("simple", simple_inputs(2)).get_response().id == ""
    assert tuple(now - then for now, then in zip(counted(caching), before, strict=True)) == (3, 1, 4, 1, 2)
    other = simple_inputs(2)
    other[1].set_data_from_numpy(np.full((2, 16), 2, np.int32))
    result = caching.client.infer("simple", other)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), np.arange(32).reshape(2, 16) + 2)
    caching.client.infer("simple", simple_inputs(2), timeout=9_000_000)
    assert tuple(now - then for now, then in zip(counted(caching), before, strict=True)) == (3, 3, 6, 3, 6)


def test_the_order_of_parameters_does_not_count(caching: Any) -> None:
    """protobuf for Python writes the members of a map in an order that is another one in each process."""
    before = counted(caching)
    request = simple_request().SerializeToString()
    parts = []
    for name in ("one", "two", "three"):
        part = pb.ModelInferRequest()
        part.parameters[name].int64_param = 1
        parts.append(part.SerializeToString())
    with grpc.insecure_channel(caching.url) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer")
        answers = [call(request + b"".join(order), timeout=20) for order in itertools.permutations(parts)]
        call(request + b"".join(parts[:2]), timeout=20)
    assert len(set(answers)) == 1
    assert tuple(now - then for now, then in zip(counted(caching), before, strict=True))[:2] == (5, 2)


def test_what_is_not_kept(caching: Any, simple_inputs: Inputs) -> None:
    before = counted(caching)
    for _ in range(2):
        caching.client.infer("simple", simple_inputs(), parameters={"gangway_stats": True})
    assert counted(caching)[:2] == before[:2]


def test_loaded_again_it_is_another_model(caching: Any, simple_inputs: Inputs, announced: Any) -> None:
    caching.client.infer("simple", simple_inputs())
    inference = caching.front_end.inference
    assert inference.cache.used_bytes
    models = caching.front_end.models
    old = models.find("simple", "")
    again = ServedModel.of(announced.message)
    assert again.load != old.load
    inference.serve(Models({**models.entries, ("simple", 1): again}))
    assert not inference.cache.used_bytes
