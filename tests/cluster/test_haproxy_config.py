"""The configuration of HAProxy: names of models, whatever they are, must not be taken for one another."""

import itertools
import re
from pathlib import Path

import pytest

from gangway.cluster.haproxy_config import ANY, RouteOptions, backend_of, configuration, maps, states
from gangway.cluster.server_address import ServerAddress, parse_server
from gangway.protos import grpc_service_pb2 as pb

NAMES = ("a", "ab", "any", ":any", "::any", "a b", "a:20b", "ä", "b\nserver x", "#", "x" * 127, "x" * 128, "x" * 255)
SERVERS = (parse_server("one=10.0.0.1"), parse_server("two=[fe80::1]:9001,9000"))
OPTIONS = RouteOptions(Path("/run/route"))


def test_every_model_has_a_backend_of_its_own() -> None:
    names = [backend_of("grpc", name) for name in NAMES]
    assert len({*names, f"grpc{ANY}"}) == len(NAMES) + 1
    assert all(re.fullmatch(r"[A-Za-z0-9_.:-]+", name) for name in names)
    text = configuration(NAMES, SERVERS, OPTIONS)
    backends = re.findall(r"^backend (\S+)$", text, re.MULTILINE)
    assert len(backends) == len(set(backends)) == 2 * (len(NAMES) + 1)
    assert len(re.findall(r"^  server ", text, re.MULTILINE)) == len(backends) * len(SERVERS)
    assert "[fe80::1]:9001" in text


def test_the_key_of_a_model_is_how_its_requests_begin() -> None:
    lines = [line.split(" ") for line in maps(NAMES)["grpc"].splitlines()]
    assert [backend for _, backend in lines] == [backend_of("grpc", name) for name in NAMES]
    for (key, _), name in zip(lines, NAMES, strict=True):
        for message in (pb.ModelInferRequest(model_name=name, id="x"), pb.ModelReadyRequest(name=name, version="1")):
            assert message.SerializeToString().startswith(bytes.fromhex(key))
    assert not any(a.startswith(b) for a, b in itertools.permutations([key for key, _ in lines], 2))


def test_a_name_that_no_folder_has_is_left_out() -> None:
    assert maps(["", "x" * 256]) == {"grpc": "", "http": ""}


def test_the_first_states_are_those_of_the_index() -> None:
    lines = states(["a", "b"], SERVERS, {"one": frozenset("a")}, OPTIONS).splitlines()[2:]
    assert [(line.split(" ")[1], line.split(" ")[3], line.split(" ")[5]) for line in lines] == [
        ("grpc:a", "one", "2"), ("grpc:a", "two", "0"), ("grpc:b", "one", "0"), ("grpc:b", "two", "0"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ServerAddress("host", "host", 8001, 8000, 8002)),
        ("10.0.0.1:1,2,3", ServerAddress("10.0.0.1:1", "10.0.0.1", 1, 2, 3)),
        ("n=[::1]:1", ServerAddress("n", "::1", 1, 8000, 8002)),
    ],
)
def test_addresses(text: str, expected: ServerAddress) -> None:
    assert parse_server(text) == expected
