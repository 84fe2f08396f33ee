import pytest

from gangway.artifact.format import TensorSpec
from gangway.base.peer import MAX_MESSAGE_BYTES
from gangway.server import messages
from gangway.server.messages import LogSettings
from gangway.server.tracing.settings import TraceOverrides

TENSOR = TensorSpec("x", "FP32", (-1, 3, 224, 224), 602112)
REGION = messages.RegionChange("register", "é", "/key", 64, 1 << 63, 1 << 40)


@pytest.mark.parametrize(
    "message",
    [
        messages.ModelReady(3, "resnet", 7, b"foo", (TENSOR,), (TENSOR, TENSOR), 8, 8, True, qos_us=1500.5),
        messages.ModelReady(3, "mlp", 1, b"", (), (), 0, 1, True),
        messages.ModelUnavailable("broken", messages.WHOLE_MODEL, "config.pbtxt:3: é", "LOADING"),
        messages.InitialLoadDone(),
        messages.InitialLoadDone(strict_readiness=False),
        messages.ModelRemoved("gone", 3),
        messages.ModelRetired(7),
        messages.RepositoryCall(1 << 50, "load", "é", "/proc/1/fd/3"),
        messages.RepositoryAnswer(1 << 50, "INTERNAL", "no"),
        messages.ReadinessAsked(1 << 50, 3),
        messages.ReadinessTold(1 << 50, "UNAVAILABLE"),
        messages.Drain(),
        messages.Listening("[::]:8001"),
        messages.Listening("[::]:8001", "0.0.0.0:8000"),
        messages.BindFailed("address in use"),
        messages.Proposed(1 << 60, REGION),
        messages.Proposed(1, LogSettings(info=False)),
        messages.Agreed(7, TraceOverrides("m", ("TIMESTAMPS", "TENSORS"), rate=3)),
        messages.Agreed(7),
        messages.Applied(7, "ALREADY_EXISTS", "no"),
        messages.Settled(1 << 60),
        messages.AllKnown(),
    ],
)
def test_round_trip(message: messages.FrontEndMessage) -> None:
    data = messages.to_json(message)
    assert messages.from_json(data) == message
    assert len(data) < MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"type":"Nonsense"}',
        b'{"type":"Drain","x":1}',
        b'{"type":"Listening"}',
        b'{"type":"Agreed","number":1,"change":{"type":"No"}}',
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a front-end message"):
        messages.from_json(data)
