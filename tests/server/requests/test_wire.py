"""The walk over a request's bytes agrees with protobuf or refuses; nothing else ever happens."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from gangway.protos.grpc_service_pb2 import ModelInferRequest
from gangway.server.requests.contents import (
    MAX_FIELDS,
    MAX_HEADER_BYTES,
    MalformedRequestError,
    MessageForm,
    length_prefix,
    split_request,
)


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, content: bytes, wire_type: int = 2) -> bytes:
    length = varint(len(content)) if wire_type == 2 else b""
    return varint(number << 3 | wire_type) + length + content


def test_length_prefix() -> None:
    for size in (0, 1, 127, 128, 602112, 2**31):
        assert length_prefix(6, size) == field(6, b"")[:1] + varint(size)


def assert_agrees_or_refuses(message: bytes) -> None:
    try:
        header, request_id, raws = split_request(message)
    except MalformedRequestError:
        return
    try:
        expected = ModelInferRequest.FromString(message)
    except DecodeError:
        # What is wrong lies inside another field; the header still contains it.
        with pytest.raises(DecodeError):
            ModelInferRequest.FromString(header)
        return
    assert [bytes(raw) for raw in raws] == list(expected.raw_input_contents)
    assert request_id.decode() == expected.id
    expected.ClearField("raw_input_contents")
    expected.ClearField("id")
    assert ModelInferRequest.FromString(header) == expected


def test_tensors_are_taken_out_without_a_copy() -> None:
    request = ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"a" * 300, b"", b"xyz"])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    message = request.SerializeToString()
    header, request_id, raws = split_request(message)
    assert request_id == b"7"
    assert [bytes(raw) for raw in raws] == [b"a" * 300, b"", b"xyz"]
    assert all(raw.obj is message for raw in raws)
    assert ModelInferRequest.FromString(header).inputs[0].name == "x"
    assert b"aaa" not in header


def test_fields_between_and_after_tensors_are_kept() -> None:
    message = field(7, b"one") + field(1, b"m") + field(7, b"two") + field(9, b"\x05", 0) + field(2, b"1")
    header, _, raws = split_request(message)
    assert header == field(1, b"m") + field(9, b"\x05", 0) + field(2, b"1")
    assert [bytes(raw) for raw in raws] == [b"one", b"two"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\x3a", "ends within a number"),
        (b"\x3a\x05abc", "5 bytes, but only 3 follow"),
        (b"\x3a\xff\xff\xff\xff\x0f", "but only 0 follow"),
        (b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "more than 5 bytes"),
        (b"\x48" + b"\x80" * 10 + b"\x01", "more than 10 bytes"),
        (b"\xff\xff\xff\xff\x7f\x00", "field"),
        (b"\x80\x80\x80\x80\x80\x01", "more than 5 bytes"),
        (b"\x38\x05", "field 7 has wire type 0"),
        (b"\x08\x05", "field 1 has wire type 0"),
        (b"\x3b\x3c", "field 7 has wire type 3"),
        (b"\x4b\x4c", "groups"),
        (b"\x4e", "wire type 6"),
        (b"\x02\x00", "field number 0"),
        (b"\x49\x00\x00", "cut off"),
        (b"\x4d\x00\x00\x00", "cut off"),
        (b"\x1a\x02\xc3\x28", "the id is not UTF-8"),
        (field(3, b"x" * 70_000), "one id of at most"),
        (b"\x1a\x01a\x1a\x01b", "one id of at most"),
        (b"\x2a\x00" * (MAX_FIELDS + 1), "fields"),
    ],
)
def test_malformed_requests_are_refused(message: bytes, reason: str) -> None:
    with pytest.raises(MalformedRequestError, match=reason):
        split_request(message)
    assert_agrees_or_refuses(message)


def test_huge_headers_are_refused_before_they_are_parsed() -> None:
    with pytest.raises(MalformedRequestError, match="raw contents"):
        split_request(field(5, bytes(MAX_HEADER_BYTES)))


CONTENT = st.binary(max_size=40)
PIECES = st.one_of(
    st.builds(field, st.integers(1, 7), CONTENT),
    st.builds(field, st.integers(0, 2**29 + 9), CONTENT, st.integers(0, 7)),
    CONTENT,
)


@given(st.lists(PIECES, max_size=8).map(b"".join))
@example(b"")
@example(b"\xba\x80\x00\x01x")  # the tag of field 7 with padding: protobuf accepts it
@example(b"\x3a\x81\x80\x80\x80\x00x")  # and a padded length
def test_any_bytes_agree_with_protobuf_or_are_refused(message: bytes) -> None:
    assert_agrees_or_refuses(message)


@given(st.data())
def test_damaged_requests_agree_with_protobuf_or_are_refused(data: st.DataObject) -> None:
    request = ModelInferRequest(model_name="m", raw_input_contents=data.draw(st.lists(CONTENT, max_size=4)))
    request.inputs.add(
        name="x", datatype="FP32", shape=data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
    )
    request.parameters["timeout"].int64_param = 5
    message = bytearray(request.SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))
    assert_agrees_or_refuses(bytes(message[:cut]))
    assert_agrees_or_refuses(bytes(message))


@given(st.data())
def test_a_form_takes_messages_apart_as_the_walk_does(data: st.DataObject) -> None:
    request = ModelInferRequest(model_name="m", id=data.draw(st.text(max_size=3)))
    request.raw_input_contents.extend(data.draw(st.lists(CONTENT, max_size=3)))
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    message = request.SerializeToString() + data.draw(st.sampled_from([b"", field(9, b"after")]))
    form, (header, request_id, raws) = MessageForm.of(message), split_request(message)
    assert form.split(message) == (request_id, raws)
    changed = bytearray(message)
    place = data.draw(st.integers(0, len(message) - 1))
    changed[place] = data.draw(st.integers(0, 255))
    free = [form.request_id, *form.raws]
    is_alike = form.fixed_in(bytes(changed)) == form.fixed_in(message)
    assert is_alike == (changed == message or any(part.start <= place < part.stop for part in free))
    if not is_alike:
        return
    try:
        found = form.split(bytes(changed))
    except MalformedRequestError:
        with pytest.raises(MalformedRequestError):
            split_request(bytes(changed))
        return
    assert split_request(bytes(changed)) == (header, *found)


def test_steps_of_a_decoder_have_one_form() -> None:
    """Their headers differ in shapes and sizes, but not in length: what is remembered of one finds all others."""
    messages = []
    for past in range(32, 64):
        request = ModelInferRequest(model_name="decoder", raw_input_contents=[past.to_bytes(8, "little")])
        request.inputs.add(name="input_ids", datatype="INT64", shape=[1, 1])
        given = request.inputs.add(name="past", datatype="FP32", shape=[1, 8, past, 64])
        given.parameters["shared_memory_byte_size"].int64_param = past << 11
        messages.append(request.SerializeToString())
    form = MessageForm.of(messages[0])
    assert all(len(message) == len(messages[0]) and MessageForm.of(message) == form for message in messages)
    assert len({form.fixed_in(message) for message in messages}) == len(messages)
    for message in messages:
        assert split_request(message)[1:] == form.split(message)
