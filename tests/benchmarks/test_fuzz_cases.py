"""Inputs that once broke something, or nearly: the oracles of `benchmarks.fuzz` must be content with each."""

import time

import pytest

from benchmarks.fuzz.__main__ import TARGETS
from benchmarks.fuzz.oracles import ORACLES
from benchmarks.fuzz.seeds import seeds_of
from gangway.server.errors import RequestError
from gangway.server.serving.http.infer import read_request
from gangway.server.serving.http.json_text import parse

INPUT = b'{"name":"x","shape":[%d],"datatype":"%b","data":%b}'


def body(datatype: bytes, elements: bytes, count: int = 1, more: bytes = b"") -> bytes:
    return b'{"inputs":[' + INPUT % (count, datatype, elements) + b"]" + more + b"}"


def posted(path_number: int, content: bytes) -> bytes:
    return bytes([path_number, 0, 1, 0]) + content


DEEP = b'{"a":' * 1015 + b"1" + b"}" * 1015
CASES: dict[str, tuple[str, bytes]] = {
    "half a character as an element": ("json", body(b"INT32", b'["\\ud800"]')),
    "half a character as a string": ("json", body(b"BYTES", b'["\\ud800"]')),
    "half a character in a parameter's name": (
        "http",
        posted(0, body(b"INT32", b"[1]", 1, b',"parameters":{"\\ud800":1}')),
    ),
    "half a character in a setting": ("http", posted(11, b'{"\\udfff":1}')),
    "half a character that generate is told": ("http", posted(2, b'{"\\udfff":1}')),
    "a pair of halves": ("json", body(b"BYTES", b'["\\ud83d\\ude00", NaN]', 2)),
    "an element that is deep": ("json", body(b"INT32", b"[" + DEEP + b"]")),
    "a size that is deep": ("http", posted(8, b'{"key":"k","byte_size":' + DEEP + b"}")),
    "a setting that is deep": ("http", posted(10, b'{"trace_rate":' + DEEP + b"}")),
    "a shape that is deep": ("json", b'{"inputs":[{"name":"x","datatype":"INT32","shape":' + DEEP + b',"data":[]}]}'),
    "a large whole number beside infinity": ("json", body(b"FP32", b"[NaN,1%b,Infinity]" % (b"0" * 30), 3)),
    "more digits than a float has": ("json", body(b"FP64", b"[1e999]")),
    "a whole number that no float holds": ("json", body(b"FP64", b"[NaN,1%b]" % (b"0" * 400), 2)),
    "minus zero": ("json", body(b"FP32", b"[-0,-0.0,0]", 3)),
    "two members of one name": ("json", body(b"INT8", b"[1]", 1, b',"id":"a","id":"b"')),
    "a request that is empty": ("wire", b""),
    "the id twice": ("wire", b"\x1a\x01a\x1a\x01b"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str) -> None:
    target, content = CASES[name]
    ORACLES[target](content)


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_what_is_left_of_them(target: str) -> None:
    for seed in seeds_of(target):
        for end in {len(seed), len(seed) // 2, len(seed) - 1}:
            ORACLES[target](seed[:end])


def test_a_number_that_is_written_with_digits_is_finite() -> None:
    with pytest.raises(RequestError, match="1e999 is out of range"):
        parse(b"[1e999]")
    assert parse(b"[Infinity,-Infinity,1e308]") == [float("inf"), float("-inf"), 1e308]


def test_a_shape_of_very_many_sizes_costs_nothing() -> None:
    """Their product would be a number of megabytes."""
    text = b'{"inputs":[{"name":"x","datatype":"INT32","data":[1],"shape":[' + b"9," * 1_000_000 + b"9]}]}"
    begin_s = time.process_time()
    with pytest.raises(RequestError, match="expected at most 32 dimensions in 'shape', got 1000001"):
        read_request("simple", "", text)
    assert time.process_time() - begin_s < 5  # the product would take longer
