"""How much room answers of Python models get."""

import pytest

from gangway.executor.python_program import STATUS_BYTES
from gangway.server.requests.codecs import AnswerSize
from gangway.server.requests.python_codec import MOST_ROOM_BYTES, PythonCodec


@pytest.mark.parametrize(
    ("size_bytes", "has_room"), [(0, True), (1, True), (100_000, True), (900_000, True), (MOST_ROOM_BYTES, False)]
)
def test_an_answer_that_had_no_room_has_it_next_time(size_bytes: int, has_room: bool) -> None:
    room = AnswerSize(64)
    codec = PythonCodec(model=None, outputs=(), inputs=(), shapes=(), answer_size=room)  # type: ignore[arg-type]
    codec.expect([("y", "BYTES", (1,), size_bytes)])
    assert (room.size_bytes > size_bytes + STATUS_BYTES) == has_room
    assert room.size_bytes <= MOST_ROOM_BYTES
    before = room.size_bytes
    codec.expect([("y", "BYTES", (1,), 0)])
    assert room.size_bytes >= before, "a short answer takes no room from longer ones"
