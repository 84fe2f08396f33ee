"""The log of a whole server, and LogSettings by a real client."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import LiveServer, live_server, stop
from testing.load import raw_channel
from testing.waiting import until

TIMEOUT_S = 30
DEFAULTS = {
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 1,
    "log_format": "json",
}


@dataclass(frozen=True)
class Logging:
    """A server that writes JSON lines, details included, to `file`."""

    server: LiveServer
    file: Path
    client: triton.InferenceServerClient

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines() if line.startswith("{")]

    def settings(self) -> dict[str, Any]:
        settings = self.client.get_log_settings(as_json=True)["settings"]
        return {name: next(iter(value.values()), None) for name, value in settings.items()}

    def ask_for_nothing(self, model: str = "nothing") -> None:
        with pytest.raises(InferenceServerException, match="unknown model"):
            self.client.get_model_config(model)

    def await_line(self, text: str, path: Path | None = None) -> str:
        file = path or self.file
        until(lambda: file.exists() and text in file.read_text(), lambda: f"no line with {text!r}")
        return next(line for line in file.read_text().splitlines() if text in line)


@pytest.fixture(scope="module")
def logging_server(compiled_zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logging]:
    file = tmp_path_factory.mktemp("logs") / "server.log"
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", f"--log-file={file}", "--log-format=json", "--log-verbose=1"]
    with live_server(compiled_zoo.repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Logging(server, file, client)


@pytest.fixture
def served(logging_server: Logging) -> Iterator[Logging]:
    yield logging_server
    if logging_server.server.process.poll() is None:
        logging_server.client.update_log_settings(DEFAULTS)


def test_every_line_is_an_object_and_says_whose_it_is(served: Logging) -> None:
    served.await_line("ready: gRPC")
    served.ask_for_nothing("anything")
    served.await_line("'anything'")
    assert {line[0] for line in served.file.read_text().splitlines()} == {"{"}
    lines = served.lines()
    assert {"supervisor", "front end"} <= {line["process"] for line in lines}
    for line in lines:
        assert line.keys() >= {"time", "level", "process", "logger", "message"}
        assert line["level"] in ("DEBUG", "INFO", "WARNING", "ERROR")
        assert line["logger"].startswith("gangway.") or line["level"] != "DEBUG"  # hpack tells each header
    assert served.server.log.read_text().count("INFO") == 0, "the summary alone goes to standard output"


def test_settings_by_a_client(served: Logging) -> None:
    assert "logging" in served.client.get_server_metadata().extensions
    shown = served.settings()
    assert shown.pop("log_file") == str(served.file)
    assert {name: int(value) if name == "log_verbose_level" else value for name, value in shown.items()} == DEFAULTS
    served.client.update_log_settings({"log_info": False, "log_verbose_level": 0})
    served.ask_for_nothing("unheard")
    served.client.update_log_settings({"log_error": False})  # of which INFO would tell
    served.client.update_log_settings({"log_info": True, "log_verbose_level": 1})
    served.ask_for_nothing("heard")
    served.await_line("'heard'")
    text = served.file.read_text()
    assert "unheard" not in text
    told = [line["message"] for line in served.lines() if "changed by a client" in line["message"]]
    assert "info=True" in told[-1]
    assert not any("error=False" in line and "info=False" in line for line in told)


def test_a_change_of_form_holds_for_all_processes(served: Logging) -> None:
    served.client.update_log_settings({"log_format": "ISO8601"})
    served.ask_for_nothing("with\nnewline")
    line = served.await_line("with\\nnewline")
    assert " DEBUG front end: refused: NOT_FOUND: Request for unknown model: " in line
    assert served.await_line("Z INFO supervisor: log settings changed by a client").startswith("20")


@pytest.mark.parametrize(
    "settings, code, message",
    [
        ({"log_file": "/tmp/else"}, "UNIMPLEMENTED", "log file location can not be updated through network protocol"),
        ({"log_format": "xml"}, "INVALID_ARGUMENT", "invalid argument for log_format, got: xml"),
        ({"log_info": None}, "INVALID_ARGUMENT", "expect boolean for 'log_info'"),
        ({"log_depth": True}, "INVALID_ARGUMENT", "unknown log setting 'log_depth'"),
        ({"log_verbose_level": 2**31}, "INVALID_ARGUMENT", "expect int32 for 'log_verbose_level'"),
    ],
)
def test_what_cannot_be_set(served: Logging, settings: dict[str, Any], code: str, message: str) -> None:
    before = served.settings()
    with pytest.raises(InferenceServerException, match=message) as caught:
        served.client.update_log_settings({"log_error": False, **settings})
    assert caught.value.status() == f"StatusCode.{code}"
    assert served.settings() == before, "nothing of a wrong request holds"


def test_the_file_is_begun_anew_when_it_was_moved_away(served: Logging) -> None:
    old = served.file.with_suffix(".1")
    served.file.rename(old)
    served.ask_for_nothing("after rotation")
    assert served.await_line("after rotation", served.file)
    assert "after rotation" not in old.read_text()


def test_last_who_asks_wrongly_again_and_again_does_not_fill_the_disk(served: Logging) -> None:
    """Ends the server: so that it says at once how much it has held back."""
    refused, requests = "refused: %s: %s", 500
    served.file.write_text("")
    with raw_channel(served.server.url) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelConfig")
        for _ in range(requests):
            with pytest.raises(grpc.RpcError, match="unknown model"):
                ask(pb.ModelConfigRequest(name="x").SerializeToString(), timeout=TIMEOUT_S)
    assert stop(served.server.process) == 0
    messages = [line["message"] for line in served.lines() if line["process"] == "front end"]
    written = sum("refused: NOT_FOUND" in message for message in messages)
    assert written <= 10
    held = [int(message.split()[0]) for message in messages if message.endswith(f"held back: {refused}")]
    assert sum(held) + written == requests
    assert len(messages) < 50
