"""The order of a stream's requests and answers."""

from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.serving.grpc.stream_messages import sequence_of
from gangway.server.serving.grpc.stream_order import AnswerOrder, SequenceQueues


@dataclass(frozen=True)
class Step:
    name: str
    sequence: int | str | None


def test_requests_of_a_sequence_wait_for_each_other() -> None:
    queues: SequenceQueues[Step] = SequenceQueues()
    a1, a2, a3, b1, free = Step("a1", 7), Step("a2", 7), Step("a3", 7), Step("b1", "7"), Step("free", None)
    assert [queues.enter(step) for step in (a1, a2, b1, free, a3, free)] == [True, False, True, True, False, True]
    assert queues.leave(free) is None
    assert queues.leave(a1) is a2
    assert queues.leave(b1) is None
    assert queues.enter(b1)
    assert queues.leave(a2) is a3
    assert queues.leave(a3) is None
    assert queues.enter(a1)


def test_a_stream_that_has_ended_begins_nothing() -> None:
    queues: SequenceQueues[Step] = SequenceQueues()
    first, second = Step("first", 1), Step("second", 1)
    queues.enter(first)
    queues.enter(second)
    queues.clear()
    assert queues.leave(first) is None


def test_answers_are_kept_back_until_it_is_their_turn() -> None:
    order: AnswerOrder[str] = AnswerOrder()
    tickets = [order.ticket(["line"]) for _ in range(4)]
    assert order.put(tickets[2], "c") == []
    assert order.put(tickets[0], "a") == ["a"]
    assert order.put(tickets[1], "b") == ["b", "c"]
    assert order.put(tickets[3], "d") == ["d"]


def test_an_answer_waits_for_all_lines_that_it_stands_in() -> None:
    order: AnswerOrder[str] = AnswerOrder()
    a, free, both, b, last = (order.ticket(lines) for lines in (["a"], [], ["a", "b"], ["b"], ["b", "a"]))
    assert order.put(free, "free") == ["free"]
    assert order.put(b, "b") == []
    assert order.put(both, "both") == []
    assert order.put(last, "last") == []
    assert order.put(a, "a") == ["a", "both", "b", "last"]
    assert order.put(order.ticket(["a", "b"]), "empty again") == ["empty again"]


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=12), st.randoms())
def test_every_answer_is_sent_once_and_no_line_changes_its_order(lines: list[set[str]], random: Random) -> None:
    order: AnswerOrder[int] = AnswerOrder()
    tickets = [order.ticket(sorted(own)) for own in lines]
    numbers = list(range(len(tickets)))
    random.shuffle(numbers)
    sent = [answer for number in numbers for answer in order.put(tickets[number], number)]
    assert sorted(sent) == list(range(len(tickets)))
    for line in "abc":
        own = [number for number in sent if line in lines[number]]
        assert own == sorted(own)


def header(**parameters: int | str) -> bytes:
    request = pb.ModelInferRequest(model_name="simple")
    for name, value in parameters.items():
        parameter = request.parameters[name]
        if isinstance(value, str):
            parameter.string_param = value
        else:
            parameter.int64_param = value
    return request.SerializeToString()


def test_which_sequence_a_request_belongs_to() -> None:
    assert sequence_of(header(sequence_id=5)) == ("simple", 5)
    assert sequence_of(header(sequence_id=-2)) == ("simple", 2**64 - 2)
    assert sequence_of(header(sequence_id="five")) == ("simple", "five")
    assert sequence_of(header(sequence_id=0)) is None
    assert sequence_of(header(sequence_id="")) is None
    assert sequence_of(header(priority=1)) is None
    assert sequence_of(header(note="sequence_id")) is None
    assert sequence_of(header(sequence_id=5)[:-1]) is None
