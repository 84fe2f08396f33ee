"""Requests to models for onnxruntime without a server: for tests, benchmarks and measurements."""

from collections.abc import Sequence

from gangway.executor.frames import needed_bytes, plan_frame, read_frame, write_header
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotRequest

Contents = bytes | memoryview


def write_request(
    io: Segment,
    offset: int,
    model_id: int,
    rows: int,
    tensors: Sequence[tuple[Sequence[int], Contents]],
    answer_bytes: int,
) -> SlotRequest:
    """Write the frame of these (shape, contents) at `offset` of an io segment, room for the answer behind it.

    Returns the request for it. Raises ValueError if the segment ends before.
    """
    frame = plan_frame([(shape, len(content)) for shape, content in tensors])
    answer = offset + frame.size_bytes
    if answer + answer_bytes > io.size_bytes:
        raise ValueError(f"{frame.size_bytes} and {answer_bytes} bytes do not fit behind byte {offset}")
    view = io.view[offset:answer]
    write_header(view, frame)
    for part, (_, content) in zip(frame.parts, tensors, strict=True):
        view[part.offset : part.offset + part.size_bytes] = content
    io.view[answer : answer + answer_bytes] = bytes(answer_bytes)
    return SlotRequest(model_id, rows, (offset,), (answer,), frame_bytes=(frame.size_bytes, answer_bytes))


def read_answer(io: Segment, request: SlotRequest) -> list[tuple[tuple[int, ...], bytes]]:
    """Return shape and contents of each output; none if there is no answer yet.

    Raises ValueError if the answer had too little room.
    """
    (begin,), size_bytes = request.output_offsets, request.frame_bytes[1]
    view = io.view[begin : begin + size_bytes]
    if not needed_bytes(view):
        return []
    return [(part.shape, bytes(view[part.offset : part.offset + part.size_bytes])) for part in read_frame(view).parts]
