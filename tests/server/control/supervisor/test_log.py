"""Parts of the log: what is held back, what a line may look like, and what becomes of its file."""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangway.base.logs import ALWAYS, MAX_KINDS, MAX_LINE_BYTES, OFTEN, LogLevels, RateLimit, decode, encode
from gangway.server.control.supervisor.log import LogFile, ServerLog, StandardError, formatter_of
from gangway.server.messages import LogSettings
from gangway.server.options.command_line import parse_options
from tests.helpers.full_disk import files_of_at_most
from tests.server.conftest import no_more_threads


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Limited:
    """A logger whose lines pass a limit; `now` is its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kept = Kept()
        self.limit = RateLimit(self.kept, period_seconds=30, clock=lambda: self.now)
        self.log = logging.Logger("limited")
        self.log.addHandler(self.kept)


@pytest.fixture
def limited() -> Iterator[Limited]:
    made = Limited()
    yield made
    made.limit.report(everything=True)  # which ends its timer


def record_of(message: str, **more: Any) -> logging.LogRecord:
    basis = {"name": "gangway", "levelno": logging.INFO, "levelname": "INFO", "msg": message, "created": 1.5}
    return logging.makeLogRecord({**basis, **more})


def test_lines_of_one_kind_are_held_back_and_counted(limited: Limited) -> None:
    for number in range(1000):
        limited.log.warning("refused: %s", number, extra=OFTEN)
        limited.log.warning("something else %d", number % 5, extra=ALWAYS)
    assert [line for line in limited.kept.lines if "refused" in line] == [f"refused: {n}" for n in range(10)]
    assert sum("else" in line for line in limited.kept.lines) == 1000
    limited.limit.report()
    assert not any("held back" in line for line in limited.kept.lines), "the period is not over"
    limited.now = 31
    limited.limit.report()
    assert limited.kept.lines[-1] == "990 more lines like this one were held back: refused: %s"
    limited.log.warning("refused: %s", "again", extra=OFTEN)
    assert limited.kept.lines[-1] == "refused: again"


def test_lines_are_held_back_also_where_no_thread_can_be_started(limited: Limited) -> None:
    with no_more_threads():
        for _ in range(20):
            limited.log.warning("refused", extra=OFTEN)
    limited.limit.report(everything=True)
    assert limited.kept.lines[-1] == "10 more lines like this one were held back: refused"


def test_an_exception_of_any_thread_ends_the_process() -> None:
    program = """
import threading, time
from gangway.base.logs import LogLevels, ProcessLog
ProcessLog(LogLevels())
threading.Thread(target=lambda: 1 / 0, name="serving").start()
time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=30, check=False)
    said = decode(ended.stderr)
    assert ended.returncode == 1 and said is not None
    assert said["message"] == "an exception ends thread serving and this process"
    assert "ZeroDivisionError" in said["exception"]


def test_a_hundred_lines_a_period_are_normal(limited: Limited) -> None:
    for period in range(3):
        limited.now = 31.0 * period
        for number in range(100):
            limited.log.info("model %d is ready", number)
    limited.limit.report(everything=True)
    assert len(limited.kept.lines) == 300


def test_kinds_without_number_are_no_way_around(limited: Limited) -> None:
    for number in range(10 * MAX_KINDS):
        limited.log.error(f"line {number}")
    assert len(limited.kept.lines) <= MAX_KINDS + 100
    limited.limit.report(everything=True)
    held = sum(int(line.split()[0]) for line in limited.kept.lines if "held back" in line)
    assert held + sum(line.startswith("line") for line in limited.kept.lines) == 10 * MAX_KINDS


@pytest.mark.parametrize("text", ["x" * 100_000, "\x00" * 100_000, "ü\u2028" * 50_000, "\udc80" * 10_000])
def test_a_line_on_the_way_is_never_longer_than_a_pipe_takes_at_once(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        line = encode(record_of(text, exc_info=sys.exc_info(), fields={"model": text}), lost=3)
    assert len(line) <= MAX_LINE_BYTES
    content = decode(line.rstrip(b"\n"))
    assert content is not None
    assert line.count(b"\n") == 1
    assert content["lost"] == 3
    assert content["message"].startswith(text[:20])
    assert content["exception"].startswith("Traceback")


@pytest.mark.parametrize("line", [b"", b"E0000 00:00:00 a.cc:1] x", b"\x1e", b"\x1e{", b"\x1e[1]", b"\xff\xfe", b"{}"])
def test_other_lines_are_no_records(line: bytes) -> None:
    assert decode(line) is None


def test_levels_are_independent() -> None:
    levels = LogLevels(info=False, warning=True, error=False, verbose=1)
    wanted = [level for level in (10, 20, 30, 40, 50) if levels.allow(level)]
    assert wanted == [logging.DEBUG, logging.WARNING]
    assert LogLevels.from_number(levels.to_number()) == levels
    assert LogLevels(False, False, False).threshold > logging.CRITICAL


def test_a_client_cannot_begin_a_line_of_the_log() -> None:
    forged = record_of("unknown model: 'x\n2026-01-01 ERROR supervisor: gone\x1b[31m\u2028'")
    assert formatter_of("default").format(forged).count("\n") == 0
    assert formatter_of("default").format(forged).endswith(r"supervisor: gone\x1b[31m\u2028'")
    assert formatter_of("ISO8601").format(record_of("m")) == "1970-01-01T00:00:01.500Z INFO supervisor: m"
    assert json.loads(formatter_of("json").format(forged))["message"] == forged.msg


def test_json_has_fields_and_exceptions() -> None:
    line = formatter_of("json").format(record_of("m", source="worker 1", fields={"model": "a"}, exc_text="Traceback"))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500000Z",
        "level": "INFO",
        "process": "worker 1",
        "logger": "gangway",
        "message": "m",
        "fields": {"model": "a"},
        "exception": "Traceback",
    }


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ("terminate called", "ERROR", "terminate called"),
        ("<4>m: onnxruntime: failed", "WARNING", "m: onnxruntime: failed"),
        ("<3>wrong", "ERROR", "wrong"),
        ("<6>said", "INFO", "said"),
        ("<7>a detail", "DEBUG", "a detail"),
        ("W0000 00:00:00.123 1 grpc.cc:1] late", "WARNING", "W0000 00:00:00.123 1 grpc.cc:1] late"),
        ("\x1b[0;93m2026-11-25 18:00:00.5 [W:onnxruntime:Default, d.cc:1 F] no\x1b[m", "WARNING", r"\x1b[0;93m2026"),
        ("2026-11-25 18:00:00.5 [E:onnxruntime:Default, env.cc:1 F] no", "ERROR", "2026"),
        ("Error in cpuinfo: failed to parse", "DEBUG", "Error in cpuinfo: failed to parse"),
    ],
)
def test_a_line_of_a_library_has_its_level(
    capsys: pytest.CaptureFixture[str], line: str, level: str, text: str
) -> None:
    async def run() -> None:
        log = ServerLog(LogSettings(verbose_level=1))
        with log.of_child("worker 0") as descriptor:
            os.write(descriptor, f"{line}\n".encode())
        await log.finish(5)

    handlers = logging.getLogger().handlers
    try:
        asyncio.run(run())
    finally:
        logging.getLogger().handlers = handlers
    assert f"{level} worker 0: {text}" in capsys.readouterr().err


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(str(path))
    file.emit(record_of("one"))
    path.rename(tmp_path / "log.1")
    file.emit(record_of("two"))
    file.close()
    assert (tmp_path / "log.1").read_text() == "one\n"
    assert path.read_text() == "two\n"


def test_without_a_file_lines_go_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = LogFile(str(folder / "log"))
    (folder / "log").unlink()
    folder.rmdir()
    for _ in range(3):
        file.emit(record_of("kept"))
    said = capsys.readouterr().err
    assert said.count("kept\n") == 3
    assert said.count("cannot write the log to") == 1
    folder.mkdir()
    file.emit(record_of("back"))
    file.close()
    assert (folder / "log").read_text() == "back\n"


def test_a_line_is_in_the_file_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    file = LogFile(str(path))
    file.emit(record_of("one"))
    with files_of_at_most(10):
        file.emit(record_of("longer than what fits"))
        assert path.read_text() == "one\n"
    file.emit(record_of("two"))
    file.close()
    assert path.read_text() == "one\ntwo\n"
    assert "longer than what fits\n" in capsys.readouterr().err


def test_a_standard_error_that_nobody_reads_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as reader, open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        handler = StandardError()
        for number in range(300):
            handler.emit(record_of(f"{number:04d}" + "x" * 1000))
        taken = len(reader.read(1 << 20).splitlines())
        handler.emit(record_of("again"))
        *_, told, last = reader.read(1 << 20).decode().splitlines()
        monkeypatch.undo()
    assert 0 < taken < 100
    assert told == f"{300 - taken} lines were lost: standard error was not read"
    assert last == "again"


def test_flags(tmp_path: Path) -> None:
    given = ["--log-info=false", "--log-warning", "0", "--log-error=True", "--log-verbose=2", "--log-format=json"]
    options = parse_options([f"--model-repository={tmp_path}", f"--log-file={tmp_path}/log", *given])
    assert options.logs == LogSettings(f"{tmp_path}/log", False, False, True, 2, "json")
    assert parse_options([f"--model-repository={tmp_path}", "--log-verbose=true"]).logs.verbose_level == 1


@pytest.mark.parametrize(
    "flag",
    ["--log-info=yes", "--log-verbose=-1", "--log-verbose=99999999999", "--log-format=xml", "--log-file=/no/log"],
)
def test_flags_that_make_no_sense(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options([f"--model-repository={tmp_path}", flag])
    assert flag.partition("=")[0] in capsys.readouterr().err


def test_a_file_without_permission_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options([f"--model-repository={tmp_path}", f"--log-file={tmp_path}"])
    assert f"argument --log-file: {tmp_path}: {os.strerror(21)}" in capsys.readouterr().err
