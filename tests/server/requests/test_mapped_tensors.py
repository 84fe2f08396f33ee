"""Which tensors of a request are used where the client has them."""

from collections.abc import Sequence

import pytest

from gangway.server.models.tensors import Shapes, Tensor
from gangway.server.requests.codecs import AnswerSize, Codec, ResponseTemplate
from gangway.server.requests.data_plane import RequestLayout
from gangway.server.requests.mapped_tensors import LEAST_BYTES, Candidates, candidates_of
from gangway.server.requests.regions import RegionRange

LARGE = LEAST_BYTES
ROWS = 2


def candidates(
    inputs: Sequence[tuple[str, int, RegionRange | None]],  # type, bytes of a row, source
    outputs: Sequence[tuple[str, int, RegionRange | None]] = (),
) -> Candidates | None:
    tensors = [Tensor(f"x{index}", kind, (-1, 4), index) for index, (kind, _, _) in enumerate(inputs)]
    results = {f"y{index}": Tensor(f"y{index}", kind, (-1, 4), index) for index, (kind, _, _) in enumerate(outputs)}
    layout = RequestLayout(1, tuple(size for _, size, _ in inputs), tuple(size for _, size, _ in outputs))
    sinks = {index: sink for index, (_, _, sink) in enumerate(outputs) if sink is not None}
    call = Codec(
        model=None,  # type: ignore[arg-type]
        outputs=(),
        sinks=sinks,
        inputs=tuple(tensors),
        shapes=(),
        memory=layout,
        response=ResponseTemplate(b"", ()),
    )
    shapes = Shapes(ROWS, tuple((tensor, (ROWS, 4)) for tensor in tensors), {})
    return candidates_of(call, shapes, tuple(source for _, _, source in inputs), results)


def within(region: str, offset: int = 0, size_bytes: int = ROWS * LARGE) -> RegionRange:
    return RegionRange(region, offset, size_bytes)


@pytest.mark.parametrize(("datatype", "alignment"), [("FP16", 4), ("FP32", 4), ("FP64", 8)])
def test_floats(datatype: str, alignment: int) -> None:
    found = candidates([(datatype, LARGE, within("a"))], [(datatype, LARGE, within("b"))])
    assert found == Candidates(((0, 0, alignment),), ((0, within("b"), alignment),))


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT32", "UINT64"])
def test_whole_numbers_are_copied(datatype: str) -> None:
    assert candidates([(datatype, LARGE, within("a"))], [(datatype, LARGE, within("b"))]) is None
    mixed = candidates([(datatype, LARGE, within("a")), ("FP32", LARGE, within("b"))])
    assert mixed == Candidates(((1, 1, 4),), ())


def test_small_ones_are_copied() -> None:
    half = LEAST_BYTES // ROWS // 2
    assert candidates([("FP32", half, within("a", 0, ROWS * half))]) is None
    together = candidates(
        [("FP32", half, within("a", 0, ROWS * half)), ("FP32", half, within("a", LARGE, ROWS * half))],
        [("FP32", 4, within("b", 0, 8))],
    )
    assert together == Candidates(((0, 0, 4), (1, 1, 4)), ())


def test_those_in_messages() -> None:
    assert candidates([("FP32", LARGE, None)], [("FP32", LARGE, None)]) is None
    found = candidates([("FP32", LARGE, None)], [("FP32", LARGE, within("b"))])
    assert found == Candidates((), ((0, within("b"), 4),))


def test_an_output_has_the_room_that_it_needs_and_no_more() -> None:
    found = candidates([("FP32", LARGE, None)], [("FP32", LARGE, within("b", 64, 1 << 40))])
    assert found == Candidates((), ((0, within("b", 64), 4),))


@pytest.mark.parametrize("offset", [0, 4, ROWS * LARGE - 4])
def test_an_output_over_another_tensor_is_copied(offset: int) -> None:
    both = candidates([("FP32", LARGE, within("a"))], [("FP32", LARGE, within("a", offset))])
    assert both == Candidates(((0, 0, 4),), ())
    copied = candidates([("INT32", LARGE, within("a"))], [("FP32", LARGE, within("a", offset))])
    assert copied is None
    outputs = [("FP32", LARGE, within("b")), ("FP32", LARGE, within("b", offset))]
    assert candidates([("FP32", LARGE, None)], outputs) is None


def test_neighbours_are_not_over_each_other() -> None:
    found = candidates([("FP32", LARGE, within("a"))], [("FP32", LARGE, within("a", ROWS * LARGE))])
    assert found == Candidates(((0, 0, 4),), ((0, within("a", ROWS * LARGE), 4),))


def test_not_by_onnxruntime() -> None:
    call = Codec(
        model=None,  # type: ignore[arg-type]
        outputs=(),
        answer_size=AnswerSize(0),
        sinks={0: within("a")},
        inputs=(),
        shapes=(),
    )
    assert candidates_of(call, Shapes(1, (), {}), (), {}) is None
