"""`triton_python_backend_utils` as a model.py sees it: tensors, requests, types, and ModelConfig."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from gangway.python_backend import triton_python_backend_utils as pb_utils
from gangway.python_backend.executions import Form, OutputCheck, Responder, decode_tensors, encode_tensors
from gangway.python_backend.tensors import DATATYPES

CONFIG: dict[str, Any] = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
    "output": [
        {"name": "y", "data_type": "TYPE_FP32", "dims": [-1]},
        {"name": "z", "data_type": "TYPE_INT32", "dims": [1]},
        {"name": "s", "data_type": "TYPE_STRING", "dims": [6], "reshape": {"shape": [2, 3]}},
    ],
}
ABOUT: dict[str, Any] = {"wanted": ["y"], "room_bytes": 1 << 20, "most_bytes": 1 << 20}


@pytest.mark.parametrize("name", DATATYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 0, 4)])
def test_tensors_survive_the_way(name: str, shape: tuple[int, ...]) -> None:
    _, dtype = DATATYPES[name]
    array: Any = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    array = array.astype(str).astype(object) if name == "BYTES" else array.astype(dtype)
    described, contents = encode_tensors([pb_utils.Tensor("t", array), pb_utils.Tensor("u", array)], 1 << 20, "it")
    for tensor in decode_tensors(described, memoryview(b"".join(map(bytes, contents)))):
        got = tensor.as_numpy()
        assert got.shape == shape
        assert tensor.triton_dtype() == DATATYPES[name][0]
        assert got.flags.writeable
        expected = [str(each).encode() for each in array.ravel()] if name == "BYTES" else array.ravel().tolist()
        assert got.ravel().tolist() == expected


@pytest.mark.parametrize("side", [2, 100])
@pytest.mark.parametrize("layout", [lambda array: array, np.transpose, np.asfortranarray, lambda array: array[::2, 1:]])
def test_contents_are_in_row_major_order(side: int, layout: Callable[[Any], Any]) -> None:
    """Whatever the array's strides are, and whether it is short or not."""
    array = layout(np.arange(side * side, dtype=np.int32).reshape(side, side))
    ((described,), (content,)) = encode_tensors([pb_utils.Tensor("t", array)], 1 << 20, "it")
    assert described == ("t", "INT32", array.shape, array.nbytes)
    assert bytes(content) == array.tobytes()


@pytest.mark.parametrize("content", [b"", b"\x05\x00\x00\x00ab", b"\x01\x00\x00\x00abc", b"\xff\xff\xff\xff"])
def test_strings_that_are_cut_off(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"element|follow"):
        decode_tensors([("t", "BYTES", [1], len(content))], memoryview(content))


@pytest.mark.parametrize("array", [np.zeros(2, np.complex64), np.zeros(2, "datetime64[s]"), [1, 2], None])
def test_what_is_no_tensor(array: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="tensor 't'"):
        pb_utils.Tensor("t", array)


def test_texts_have_no_dlpack() -> None:
    with pytest.raises(pb_utils.TritonModelException, match="'t' is of BYTES"):
        pb_utils.Tensor("t", np.array(["a"], dtype=object)).to_dlpack()


def test_types_by_all_their_names() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_FP16") is np.float16
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    for number in range(1, 14):
        assert pb_utils.numpy_to_triton_type(pb_utils.triton_to_numpy_type(number)) == number
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    tensor = pb_utils.Tensor.from_dlpack("t", np.arange(3, dtype=np.int64))
    assert np.array_equal(np.from_dlpack(tensor), np.arange(3))
    capsule = np.arange(3, dtype=np.float32).__dlpack__()
    tensor = pb_utils.Tensor.from_dlpack("t", capsule)
    assert np.array_equal(tensor.as_numpy(), np.arange(3, dtype=np.float32))
    read_only = np.arange(3)
    read_only.flags.writeable = False
    assert np.array_equal(np.from_dlpack(pb_utils.Tensor("t", read_only)), np.arange(3))
    for wrong in (5, "text", capsule):
        with pytest.raises(pb_utils.TritonModelException, match="'t' cannot be made of a DLPack tensor"):
            pb_utils.Tensor.from_dlpack("t", wrong)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([b"a", b"", b"bc"], object), b"\1\0\0\0a\0\0\0\0\2\0\0\0bc"),
        (np.array([[b"\xff\0"], ["\u00e9"]], object), b"\2\0\0\0\xff\0\2\0\0\0\xc3\xa9"),
        (np.array([7, None], object), b"\1\0\0\x007\4\0\0\0None"),
        (np.array([b"ab", b"c"]), b"\2\0\0\0ab\1\0\0\0c"),
        (np.array([], object), ()),
        (np.array([1, 2]), None),
        (np.array(["text"]), None),
    ],
)
def test_elements_as_bytes(array: Any, expected: Any) -> None:
    """What Triton's functions give, () and None included."""
    assert pb_utils.serialize_byte_tensor(array) == expected
    if expected is not None:
        for encoded in (expected, np.frombuffer(expected, np.uint8)) if expected else (expected,):
            found = pb_utils.deserialize_bytes_tensor(encoded)
            assert found.dtype == object
            texts = [each if isinstance(each, bytes) else str(each).encode() for each in array.ravel().tolist()]
            assert found.tolist() == texts


@pytest.mark.parametrize("encoded", [b"\5\0\0\0ab", b"\1\0\0\0abc", b"\xff\xff\xff\xff"])
def test_elements_that_are_cut_off(encoded: bytes) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="the elements cannot be read"):
        pb_utils.deserialize_bytes_tensor(encoded)


def test_requests() -> None:
    x = pb_utils.Tensor("x", np.zeros(3, np.float32))
    request = pb_utils.InferenceRequest(b"1", 7, [x], [b"y"], b"m", parameters={"a": 1, "b": "text", "c": True})
    assert (request.request_id(), request.requested_output_names(), request.model_name()) == ("1", ["y"], "m")
    assert request.parameters() == '{"a":1,"b":"text","c":true}'
    assert pb_utils.get_input_tensor_by_name(request, "x") is x
    assert pb_utils.get_input_tensor_by_name(request, "y") is None
    with pytest.raises(pb_utils.TritonModelException, match="request in progress"):
        request.exec()
    with pytest.raises(pb_utils.TritonModelException, match="expected a text, number or flag"):
        pb_utils.InferenceRequest(parameters={"a": [1]})
    with pytest.raises(pb_utils.TritonModelException, match="Error when creating MetricFamily: this needs a server"):
        pb_utils.MetricFamily("m", "d", pb_utils.MetricFamily.COUNTER)


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("q", np.zeros((1, 1), np.float32), "none of"),
        ("y", np.zeros((1, 1), np.int32), "is of type INT32"),
        ("z", np.array([[1 << 40]]), "is of type INT64"),
        ("z", np.zeros((1, 2), np.int32), "has the shape"),
        ("z", np.zeros(1, np.int32), "has the shape"),
        ("s", np.array(["a"] * 6, object).reshape(1, 6), "has the shape"),
    ],
)
def test_outputs_that_do_not_fit(name: str, array: Any, why: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=why):
        OutputCheck(CONFIG, is_strict=True).checked([pb_utils.Tensor(name, array)])
    told: list[Mapping[str, str]] = []
    check = OutputCheck(CONFIG, tell=told.append)
    tensor = pb_utils.Tensor(name, array)
    for _ in range(2):
        assert check.checked([tensor]).tensors == ([] if name == "q" else [tensor])
    assert len(told) == 1 and why in " ".join(told[0].values())


def test_outputs_of_another_width() -> None:
    given = [pb_utils.Tensor("y", np.array([[1.5]])), pb_utils.Tensor("z", np.array([[7]]))]
    strict, lenient = (OutputCheck(CONFIG, is_strict).checked(given) for is_strict in (True, False))
    assert [tensor.as_numpy().dtype for tensor in strict.tensors] == [np.float32, np.int32]
    assert (lenient.tensors, lenient.types) == (given, {"y": "FP64", "z": "INT64"})


def test_of_two_outputs_of_a_name_the_first_one_counts() -> None:
    given = [pb_utils.Tensor("y", np.full((1, 2), value, np.float32)) for value in (1, 2)]
    assert OutputCheck(CONFIG).checked(given).tensors == given[:1]
    with pytest.raises(pb_utils.TritonModelException, match="has an output 'y', twice"):
        OutputCheck(CONFIG, is_strict=True).checked(given)


def test_a_request_has_one_final_response() -> None:
    for is_stream in (False, True):
        responder = Responder(Form(ABOUT), {}, [], OutputCheck(CONFIG), is_stream)
        response = pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros((1, 2), np.float32))])
        responder.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with pytest.raises(pb_utils.TritonModelException, match="final response"):
            responder.send(response)
        only = responder.take_only()
        assert only is not None
        assert [described[0] for described in only.header.fields["outputs"]] == ["y"]
    with pytest.raises(pb_utils.TritonModelException, match="flags"):
        Responder(Form(ABOUT), {}, [], OutputCheck(CONFIG), True).send(response, 2)
    with pytest.raises(pb_utils.TritonModelException, match="is None"):
        Responder(Form(ABOUT), {}, [], OutputCheck(CONFIG), False).send(
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )


def test_a_configuration_is_completed_but_not_contradicted() -> None:
    config = pb_utils.ModelConfig(
        json.dumps({"name": "m", "max_batch_size": 2, "input": [{"name": "x"}], "output": []})
    )
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4], "optional": True})
    config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": (4,)})
    config.set_max_batch_size(4)
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    assert config.as_dict() == {
        "name": "m",
        "max_batch_size": 4,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4], "optional": True}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": (4,)}],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
    }
    wrong: list[tuple[Any, Any, str]] = [
        (config.add_input, {"name": "x", "data_type": "TYPE_FP32", "dims": [5]}, "expects dims"),
        (config.add_output, {"name": "q", "dims": [5]}, "missing 'data_type'"),
        (config.add_output, {"name": "q", "data_type": "TYPE_FP32", "dims": [5], "optional": True}, "other than"),
        (config.set_max_batch_size, 3, "max_batch_size"),
        (config.set_model_transaction_policy, {"decoupled": False}, "decoupled"),
        (config.set_model_transaction_policy, {"coupled": False}, "other than"),
    ]
    for method, argument, why in wrong:
        with pytest.raises(ValueError, match=why):
            method(argument)
