"""What C writes into a field Python reads from it, and the other way round; constants are the same on both sides."""

import subprocess
from pathlib import Path

import pytest

from gangway.artifact import format as artifact_format
from gangway.artifact import reader
from gangway.executor import _native, segment
from gangway.executor.leases import LeaseControl, Member, PhaseKind
from gangway.executor.messages import LeftReason, MessageKind
from gangway.executor.segment import SCHEDULER_BLOCK, SLOT, StructLayout
from gangway.executor.slots import SlotState, SlotStatus

NATIVE = Path(__file__).parents[2] / "executor" / "native"
UNION = "message"  # its last field lies over all others


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The lines that layout.c prints, as words, by the second one."""
    binary = tmp_path_factory.mktemp("layout") / "layout"
    source = Path(__file__).parent / "layout.c"
    subprocess.run(["gcc", "-std=c11", "-Wall", "-Werror", f"-I{NATIVE}", str(source), "-o", str(binary)], check=True)
    lines = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[1]: line.split() for line in lines}


def filled(size_bytes, number):
    """Return the bytes that layout.c writes into the field of this number (from 1 on)."""
    return bytes(number + i % 3 for i in range(size_bytes))


@pytest.mark.parametrize("name", _native.LAYOUT)
def test_each_field_lies_where_c_has_it(shown, name):
    written = bytes.fromhex(shown[name][2])
    size_bytes, fields = _native.LAYOUT[name]
    expected = bytearray(size_bytes)
    for number, (offset, size, _) in enumerate(fields.values(), start=1):
        expected[offset : offset + size] = filled(size, number)
    assert written == expected, "and there is nothing else"


@pytest.mark.parametrize("name", [name for name in _native.LAYOUT if name != UNION])
def test_formats_read_what_c_wrote_and_write_the_same(shown, name):
    written = bytes.fromhex(shown[name][2])
    here, (_, fields) = StructLayout(name), _native.LAYOUT[name]
    numbers = [field for field, (_, _, letter) in fields.items() if letter]
    made, at = here.reading(*numbers)
    values = made.unpack_from(written, at)
    assert here.whole(*numbers).unpack(written) == values
    again = bytearray(here.size_bytes)
    for field in numbers:
        one, at = here.writing(field)
        (offset, size, _) = fields[field]
        assert (at, one.size) == (offset, size)
        one.pack_into(again, at, *one.unpack_from(written, at))
    for field, (offset, size, letter) in fields.items():
        assert bytes(again[offset : offset + size]) == (written[offset : offset + size] if letter else bytes(size)), (
            field
        )


def test_constants_are_those_of_the_header(shown):
    values = {name: int(line[2]) for name, line in shown.items() if line[0] == "value"}
    assert len(values) > 40
    assert values == {name: getattr(_native, name) for name in values}


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        (MessageKind, "MESSAGE_"),
        (LeftReason, "LEFT_"),
        (SlotState, "SLOT_"),
        (SlotStatus, "STATUS_"),
        (LeaseControl, "CONTROL_"),
        (PhaseKind, "PHASE_"),
    ],
)
def test_enumerations_are_whole(shown, kind, prefix):
    theirs = {name.removeprefix(prefix): int(line[2]) for name, line in shown.items() if name.startswith(prefix)}
    assert {member.name: member.value for member in kind} == theirs
    first = min(theirs.values())
    assert [member.value for member in kind] == list(range(first, first + len(theirs))), "tuples go by their numbers"


def test_members_are_tuples_in_the_order_of_the_struct():
    assert Member._fields == tuple(_native.LAYOUT["member"][1])


def test_limits_of_artifacts_are_those_of_the_executor():
    for name in ("MAX_ARGUMENTS", "MAX_TENSORS", "MAX_CHECKS", "MAX_LAYERS", "MAX_TASKS"):
        assert getattr(artifact_format, name) == getattr(_native, name)
    assert reader.MAX_VERSIONS == _native.MAX_VERSIONS


def test_python_has_all_structures_but_members():
    """Those come and go as tuples."""
    made = sorted(value.size_bytes for value in vars(segment).values() if isinstance(value, StructLayout))
    assert made == sorted(size_bytes for name, (size_bytes, _) in _native.LAYOUT.items() if name != "member")


def test_fields_out_of_order_or_apart_are_refused():
    with pytest.raises(ValueError, match="out of order"):
        SLOT.reading("rows", "model_id")
    with pytest.raises(ValueError, match="a structure"):
        SCHEDULER_BLOCK.reading("level", "models")
    with pytest.raises(ValueError, match="side by side"):
        SLOT.writing("model_id", "priority")
