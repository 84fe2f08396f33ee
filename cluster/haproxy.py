"""HAProxy as a process: started, given another configuration without losing calls, asked and told things, stopped."""

import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from gangway.base.parent import ending_with_this_process
from gangway.clients.errors import ClientError
from gangway.cluster.haproxy_config import socket_of

SEARCHED = "/usr/sbin:/usr/local/sbin"  # often not on a user's path
START_TIMEOUT_S = 30.0
POLL_S = 0.01
STOP_TIMEOUT_S = 30.0  # as long as a server has to finish its requests
COMMAND_TIMEOUT_S = 5.0
LONGEST_SOCKET_PATH = 107 - len(".sock.12345.tmp")  # bytes; HAProxy binds beside it first


class RouterError(ClientError):
    """HAProxy is not there, does not answer, or does not take its configuration."""


class Haproxy:
    """A running HAProxy. Raises RouterError if there is none, or if it cannot start.

    Each configuration has a process of its own: HAProxy's master (`-W`) loses signals that come while it executes
    itself again, which it does after each start of a worker. Signals of a terminal do not reach it. It ends at once
    when the thread that makes this object, or calls `reload`, ends with its process.
    """

    def __init__(self, config: Path) -> None:
        self._config = config
        self._socket = socket_of(config.parent)
        self._log = config.with_name("haproxy.log")
        self._log.unlink(missing_ok=True)
        check_config(config)
        self._former: list[subprocess.Popen[bytes]] = []  # they finish their last calls
        self._process = self._start()

    def look(self) -> None:
        """Raise RouterError, with HAProxy's own words, if it has ended."""
        self._former = [process for process in self._former if process.poll() is None]
        if self._process.poll() is not None:
            raise self._end_of(self._process)

    def reload(self) -> None:
        """Let a new process listen, and the former one end with its last call. Raises RouterError."""
        check_config(self._config)
        successor = self._start("-x", str(self._socket), "-sf", str(self._process.pid))
        self._former.append(self._process)
        self._process = successor

    def stop(self) -> None:
        """Accept no more calls, finish those under way, and return when all is over."""
        end = time.monotonic() + STOP_TIMEOUT_S
        self._process.send_signal(signal.SIGUSR1)  # the former ones have it from their successors
        for process in (self._process, *self._former):
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Return a process when it listens."""
        with self._log.open("ab") as log:
            command_line = [find_haproxy(), "-db", "-f", str(self._config), *arguments]
            process = subprocess.Popen(ending_with_this_process(command_line), stderr=log, start_new_session=True)
        end = time.monotonic() + START_TIMEOUT_S
        while not self._answers(process):
            if process.poll() is not None:
                raise self._end_of(process)
            if time.monotonic() > end:
                process.kill()
                process.wait()
                raise RouterError(f"haproxy does not listen after {START_TIMEOUT_S} s")
            time.sleep(POLL_S)
        return process

    def _answers(self, process: "subprocess.Popen[bytes]") -> bool:
        """Whether this process has the socket for commands: then it has all addresses, too."""
        with suppress(RouterError):
            return f"Pid: {process.pid}" in command(self._socket, "show info").splitlines()
        return False

    def _end_of(self, process: "subprocess.Popen[bytes]") -> RouterError:
        alerts = [line for line in self._log.read_text(errors="replace").splitlines() if "[ALERT]" in line]
        return RouterError("\n".join((f"haproxy ended with status {process.returncode}", *alerts[-5:])))


def find_haproxy() -> str:
    """Return the program's path. Raises RouterError."""
    found = shutil.which("haproxy") or shutil.which("haproxy", path=SEARCHED)
    if found is None:
        raise RouterError("there is no haproxy: install it (Debian, Ubuntu: apt-get install haproxy), 2.6 or newer")
    return found


def check_config(config: Path) -> None:
    """Raise RouterError with HAProxy's own words if it does not take a configuration."""
    checked = subprocess.run(
        [find_haproxy(), "-c", "-q", "-f", str(config)], capture_output=True, text=True, check=False
    )
    if checked.returncode:
        raise RouterError(f"haproxy does not take {config}:\n{checked.stderr.strip()}")


def check_folder(folder: Path) -> None:
    """Raise RouterError if HAProxy cannot have its files and its socket in a folder, given by its whole path."""
    if not re.fullmatch(r"[A-Za-z0-9_./+-]+", str(folder)):
        raise RouterError(f"{folder}: choose a folder whose path has letters, digits and _ . + - only")
    if len(bytes(socket_of(folder))) > LONGEST_SOCKET_PATH:
        raise RouterError(f"{folder} is too long for a socket: choose a folder with a shorter path")


def command(path: Path, text: str) -> str:
    """Let the router at a socket do a command of HAProxy's; return what it says. Raises RouterError."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(COMMAND_TIMEOUT_S)
            connection.connect(str(path))
            connection.sendall(text.encode() + b"\n")
            answer = bytearray()
            while part := connection.recv(1 << 16):
                answer += part
    except OSError as error:
        raise RouterError(f"no router answers at {path}: {error.strerror or error}") from error
    return answer.decode().strip("\n")
