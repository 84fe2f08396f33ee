"""The one decoder of JSON: values return as what they were, and whatever else comes raises ValueError with its path."""

import json
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from gangway.base.json_codec import decode, decode_tagged, encode, encode_tagged
from gangway.scheduler import messages as control
from gangway.server import messages
from gangway.server.options.command_line import FrontEndOptions, parse_options


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Shape(Enum):
    ROUND = "round"


@dataclass(frozen=True)
class Inner:
    path: Path | None
    pair: tuple[int, str]
    colours: tuple[Colour, ...] = ()


@dataclass(frozen=True)
class Other:
    number: int


class Here(msgspec.Struct, frozen=True, tag=True):
    number: int


class There(msgspec.Struct, frozen=True, tag=True):
    name: str


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...] = ()
    share: float = 0.5
    wanted: bool = True
    count: int = 1
    name: str = ""
    kind: Literal["a", "b"] = "a"
    level: Level = Level.LOW
    shape: Shape = Shape.ROUND
    sizes: dict[str, int] | None = None
    change: Here | There | None = None


MIN_INT, MAX_INT = -(1 << 63), (1 << 64) - 1
Union = Inner | Other


def text_of(**fields: Any) -> str:
    return json.dumps({**json.loads(encode(Outer())), **fields})


@pytest.mark.parametrize(
    "value",
    [
        Outer(),
        Outer((Inner(Path("/a b/ü"), (1, '\x00\n"ü\U0001f600'), (Colour.RED,)), Inner(None, (MIN_INT, "")))),
        Outer(share=1e-300, count=MAX_INT, name="\x00ü", kind="b", sizes={"": 1, "ü.x": 2}),
        Outer(change=Here(7)),
        Outer(change=There("")),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_values_return_as_what_they_were(value: Outer, indent: int | None) -> None:
    assert decode(Outer, encode(value, indent), "it") == value


def test_names_that_are_no_unicode_are_written_readably() -> None:
    value = Outer((Inner(Path("a\udcff"), (1, "\udc80b")),), name="ü\udcff", change=There("\udcff"))
    expected = Outer((Inner(Path("a?"), (1, "?b")),), name="ü?", change=There("?"))
    assert decode(Outer, encode(value), "it") == expected


def test_a_whole_number_is_a_float_where_one_is_declared() -> None:
    share = decode(Outer, text_of(share=1), "it").share
    assert (share, type(share)) == (1.0, float)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"share": "1"}, "it.share: expected `float`, got `str`"),
        ({"share": True}, "it.share: expected `float`, got `bool`"),
        ({"share": None}, "it.share: expected `float`, got `null`"),
        ({"share": 10**400}, "it"),
        ({"share": float("nan")}, "it is not JSON: "),
        ({"share": float("-inf")}, "it is not JSON: "),
        ({"wanted": 1}, "it.wanted: expected `bool`, got `int`"),
        ({"count": 1.5}, "it.count: expected `int`, got `float`"),
        ({"count": False}, "it.count: expected `int`, got `bool`"),
        ({"count": 1 << 64}, "it"),
        ({"count": MIN_INT - 1}, "it"),
        ({"count": [1]}, "it.count: expected `int`, got `array`"),
        ({"name": 1}, "it.name: expected `str`, got `int`"),
        ({"name": None}, "it.name: expected `str`, got `null`"),
        ({"kind": "c"}, "it.kind: invalid enum value 'c'"),
        ({"kind": ["a"]}, "it.kind: expected `str`, got `array`"),
        ({"level": True}, "it.level: expected `int`, got `bool`"),
        ({"level": 2}, "it.level: invalid enum value 2"),
        ({"shape": "square"}, "it.shape: invalid enum value 'square'"),
        ({"shape": {}}, "it.shape: "),
        ({"sizes": []}, "it.sizes: expected `object | null`, got `array`"),
        ({"sizes": {"a": 1, "b": None}}, r"it.sizes\[...\]: expected `int`, got `null`"),
        ({"inner": {}}, "it.inner: expected `array`, got `object`"),
        ({"inner": ""}, "it.inner: expected `array`, got `str`"),
        ({"inner": [3]}, r"it.inner\[0\]: expected `object`, got `int`"),
        ({"inner": [{"path": 1, "pair": [1, ""], "colours": []}]}, r"it.inner\[0\].path: expected a path"),
        ({"inner": [{"path": "", "pair": [1], "colours": []}]}, r"it.inner\[0\].pair: expected `array` of length 2"),
        ({"inner": [{"path": "", "pair": [1, 2], "colours": []}]}, r"it.inner\[0\].pair\[1\]: expected `str`"),
        ({"inner": [{"path": "", "pair": [1, ""], "colours": ["red", "x"]}]}, r"it.inner\[0\].colours\[1\]: invalid"),
        ({"inner": [{"path": ""}]}, r"it.inner\[0\]: object missing required field `pair`"),
        ({"inner": [{"path": "", "pair": [1, ""], "x": 1}]}, r"it.inner\[0\] has an unknown field 'x'"),
        ({"other": 1}, "it has an unknown field 'other'"),
        ({"change": {"type": "Outer"}}, "it.change.type: invalid value 'Outer'"),
        ({"change": {"type": ["Here"], "number": 1}}, "it.change.type: expected `str`"),
        ({"change": {"number": 1}}, "it.change: object missing required field `type`"),
        ({"change": {"type": "Here", "number": "1"}}, "it.change.number: expected `int`, got `str`"),
        ({"change": {"type": "Here", "number": 1, "name": ""}}, "it.change has an unknown field 'name'"),
        ({"change": [1]}, "it.change: expected `object | null`, got `array`"),
    ],
)
def test_a_wrong_value_is_named_by_its_path(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}"):
        decode(Outer, text_of(**fields), "it")


def test_a_field_that_is_not_there_has_its_default() -> None:
    fields = json.loads(encode(Outer()))
    for name in fields:
        text = json.dumps({key: value for key, value in fields.items() if key != name})
        assert decode(Outer, text, "it") == Outer()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{}{}",
        b"nonsense",
        b"\xff",
        b'{"number":' + b"9" * 5000 + b"}",  # longer than Python reads
        b"[" * 1_000_000,
        b'{"number":' * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "{}".encode("utf-16"),
    ],
)
def test_what_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it is not JSON: "):
        decode(Other, text, "it")


@pytest.mark.parametrize("text", [b"null", b"1", b"[]", b'"x"', b"true", b"[[[[1]]]]"])
def test_json_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it: expected `object`, got `\w+`$"):
        decode(Other, text, "it")
    with pytest.raises(ValueError, match=r"^it is not an object$"):
        decode_tagged(Union, text, "it")


def test_a_number_that_overflows_is_not_finite() -> None:
    with pytest.raises(ValueError, match=r"^it is not JSON: .*out of range"):
        decode(Outer, text_of().replace("0.5", "1e999"), "it")


def test_of_equal_keys_the_last_counts() -> None:
    assert decode(Other, '{"number":"x","number":2}', "it") == Other(2)
    assert decode_tagged(Union, '{"type":"Inner","number":1,"type":"Other"}', "it") == Other(1)


def test_members_of_a_union_say_what_they_are() -> None:
    assert json.loads(encode_tagged(Other(1))) == {"type": "Other", "number": 1}
    assert decode_tagged(Union, encode_tagged(Other(1)), "it") == Other(1)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_not_written(number: float) -> None:
    for indent in (None, 1):
        with pytest.raises(ValueError, match=r"^Outer.share: expected `float`, got `null`$"):
            encode(Outer(share=number), indent)


def test_the_whole_command_line_reaches_the_front_end(tmp_path: Path) -> None:
    serve = parse_options(["--model-repository", str(tmp_path), "--cores=0", "--grpc-port=1", "--log-verbose=2"])
    options = FrontEndOptions(1, 2, 3, 4, 5, "[::]:6", serve=serve)
    assert decode(FrontEndOptions, encode(options), "options") == options


HOSTILE = [None, True, -1, 1 << 70, 1e300, "", "x" * 1000, [], [[[]]], {}, {"type": "Drain"}, {"a": {"b": 1}}]
LOAD = control.LoadModel(3, "m", "ab" * 32, 7, 2, 1 << 40, 8, layer_us=(1.5,), limits=(("r", 1, 2),), max_delay_us=1.0)
READY = messages.ModelReady(3, "m", 1, b"", (), (), 8, 8, True, qos_us=1.0)


@pytest.mark.parametrize(
    ("packet", "read", "error"),
    [
        (control.encode(LOAD), control.decode, "not a control message"),
        (control.encode(control.SetProfile(1, 2.0, 3.0)), control.decode, "not a control message"),
        (control.encode(control.WorkerDied(1, 99)), control.decode, "not a control message"),
        (messages.to_json(READY), messages.from_json, "not a front-end message"),
        (messages.to_json(messages.RepositoryCall(1, "load", "m", "")), messages.from_json, "not a front-end message"),
        (
            messages.to_json(messages.Proposed(1, messages.RegionChange("register", "r", "/k", 0, 64, 7))),
            messages.from_json,
            "not a front-end message",
        ),
    ],
)
def test_hostile_messages_are_read_or_refused(packet: bytes, read: Any, error: str) -> None:
    """With any value in the place of any other, nothing but ValueError is raised, and what is read has its types."""
    content, original = json.loads(packet), read(packet)
    for name in content:
        for value in HOSTILE:
            changed = json.dumps({**content, name: value}).encode()
            try:
                message = read(changed)
            except ValueError as refused:
                assert str(refused).startswith(error)
            else:
                assert type(getattr(message, name)) is type(getattr(original, name)) or value is None
    for begin in range(len(packet)):
        with pytest.raises(ValueError, match=error):
            read(packet[:begin])


RACES = """
import sys, threading
from dataclasses import make_dataclass
from gangway.base.json_codec import decode

sys.setswitchinterval(1e-6)
FIELDS = [f"f{number}" for number in range(20)]
for number in range(200):
    inner = make_dataclass("Inner", [(name, int) for name in FIELDS])
    kind = make_dataclass("Outer", [*((name, int) for name in FIELDS), ("inner", inner)])
    values, gate = ",".join(f'"{name}":1' for name in FIELDS), threading.Barrier(4)
    text = f'{{{values},"inner":{{{values}}}}}'
    threads = [threading.Thread(target=lambda: (gate.wait(), decode(kind, text, "outer"))) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_may_meet_a_type_for_the_first_time_together() -> None:
    """As those do in which the supervisor reads models."""
    done = subprocess.run([sys.executable, "-c", RACES], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
