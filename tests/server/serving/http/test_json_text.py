"""Large arrays of numbers in JSON are found, counted and read as by a parser, and what is none is refused."""

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangway.server.errors import RequestError
from gangway.server.serving.http import json_text
from gangway.server.serving.http import json_text as json_numbers
from gangway.server.serving.http.json_text import (
    MAX_VALUES,
    NumberText,
    UnreadTensor,
    find_numbers,
    flatten,
    parse,
    to_raw,
)


@pytest.fixture(autouse=True, scope="module")
def small_parts() -> Any:
    """Parts so small that everything that can lie across their ends does; every text counts as large."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("MIN_ARRAY_BYTES", 40), ("SLICE_BYTES", 16), ("_SCAN_BYTES", 24), ("PAUSE_S", 0)):
            patch.setattr(json_numbers, name, size)
        patch.setattr(json_text, "LARGE_BYTES", 0)
        yield


def plain(value: Any) -> Any:
    """The same with the texts of all arrays of numbers parsed."""
    if isinstance(value, NumberText):
        return json.loads(value.text[value.begin : value.end])
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


numbers = st.lists(st.floats(allow_nan=False, width=64), min_size=1, max_size=30)
values = st.recursive(
    st.one_of(st.text(max_size=8), st.sampled_from(["\\", '"', '\\"', "[", "]}", '":[1,']), numbers, st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(content=st.dictionaries(st.text(max_size=5), values, max_size=4), blanks=st.booleans(), ascii_only=st.booleans())
def test_any_text_means_what_it_means_to_a_parser(content: dict[str, Any], blanks: bool, ascii_only: bool) -> None:
    text = json.dumps(content, indent=1 if blanks else None, ensure_ascii=ascii_only)
    try:
        orjson.loads(text)
    except ValueError:
        return  # half a character
    assert plain(parse(text.encode())) == json.loads(text)


def test_arrays_are_counted_where_they_are() -> None:
    data = list(range(100))
    text = json.dumps({"a": data, "b": ["[", {"c": [data, data]}]}).encode()
    content = parse(text)
    assert [content["a"].count, content["b"][1]["c"].count] == [100, 200]
    assert find_numbers(text).values < 20


@pytest.mark.parametrize("shape", [(120,), (12, 10), (3, 4, 10)])
@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL"])
def test_elements_are_those_of_a_small_array(shape: tuple[int, ...], datatype: str) -> None:
    elements = np.arange(120).reshape(shape)
    data = (elements % 3 == 0).tolist() if datatype == "BOOL" else elements.tolist()
    found = parse(json.dumps({"data": data}, indent=2).encode())["data"]
    assert isinstance(found, NumberText)
    small = flatten(data, "x")
    assert isinstance(small, list)
    assert UnreadTensor(found, datatype, "x").read() == to_raw(small, datatype, "x")


def test_words_of_numbers_that_json_has_not() -> None:
    found = parse(b'{"data":[' + b"1.5,NaN,-Infinity," * 30 + b"2]}")
    read = np.frombuffer(UnreadTensor(found["data"], "FP32", "x").read(), np.float32)
    assert np.isnan(read).sum() == 30 and np.isinf(read).sum() == 30 and read[-1] == 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("[1,[2,3]]", "mixed"),
        ("[[1,2],3]", "mixed"),
        ("[[1,2],[[3]]]", "mixed"),
        ("[[1,2]],[[3]", "JSON"),
        ("[[1,2][3]]", "match"),
        ("[[1,2],[]]", "match"),
        ("[[1,2]3]", "match"),
        ("[1,,2]", "JSON"),
        ("[1,2,]", "JSON"),
        ("[1 2]", "JSON"),
        ("[1,true]", "no element of FP32"),
        ("[1,null]", "no element of FP32"),
        ("[1,1e39]", "out of the range"),
    ],
)
def test_what_is_no_tensor(data: str, said: str) -> None:
    text = f'{{"data":{data.replace("1", "1" + " " * 45, 1)}}}'.encode()
    with pytest.raises(RequestError, match=said):
        UnreadTensor(parse(text)["data"], "FP32", "x").read()


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs":[' + b'{"a":1},' * (MAX_VALUES // 2) + b"{}]}",
        b'{"data":[' + b'"",' * MAX_VALUES + b'""]}',
        b"[" * 70_000,
        b'{"data":[' + b"1," * (json_text.MAX_JSON_BYTES // 2) + b"1]}",
    ],
)
def test_values_are_counted_before_they_are_made(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_numbers, "_SCAN_BYTES", 1 << 20)
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("parsed"))
    with pytest.raises(RequestError, match="send large tensors as binary data"):
        parse(text)


def test_strings_with_commas_are_one_value_each() -> None:
    prose = "one, two, three. " * 100
    assert parse(json.dumps({"data": [prose, prose]}).encode()) == {"data": [prose, prose]}
