"""What commands print fits a terminal of 80 columns, and is plain text in a pipe."""

import fcntl
import os
import pty
import struct
import subprocess
import termios

import pytest

from testing.live_server import LiveServer
from testing.repository import GANGWAY
from tests.conftest import CompiledZoo

pytestmark = pytest.mark.long

COLUMNS = 80
COMMANDS = (
    ("client", "resnet50", "--top=3", "--url={url}"),
    ("perf", "--mix=resnet50=1,simple=1", "--rate=20", "--seconds=1", "--warmup=0", "--qos=3x", "--url={url}"),
    ("compile", "{zoo}/mlp", "--cache-dir={cache}"),
    ("simulate", "--mix=light", "--cores=2", "--queries=100", "--rate=20", "--output={folder}"),
    ("zoo", "{folder}", "mlp"),
)


def of_terminal(command: list[str]) -> str:
    """What a command writes to a terminal of 80 columns, without the sequences that style it."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "dumb"}
    environment.pop("COLUMNS", None)
    shown = b""
    with subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(follower)
        while True:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # the end of a terminal whose other side is closed
                break
            shown += part
    os.close(leader)
    assert process.returncode == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_tables_fit(
    gangway_server: LiveServer, compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory, command: tuple[str]
) -> None:
    names = {"url": gangway_server.url, "zoo": compiled_zoo.repository, "cache": compiled_zoo.cache_dir}
    words = [*GANGWAY, *(word.format(**names, folder=tmp_path_factory.mktemp("out")) for word in command)]
    text = of_terminal(words)
    tables = [line for line in text.splitlines() if "  " in line.strip()]  # sentences may be as long as they are
    assert max((len(line.rstrip()) for line in tables), default=0) <= COLUMNS
    piped = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    for shown in (text, piped.stdout):
        assert not any(mark in shown for mark in "…│┃\x1b")
    assert "\x1b" not in piped.stderr and "\r" not in piped.stderr
