"""HAProxy as a process: started, given another configuration without losing calls, asked and told things, stopped."""

import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from gangway.clients.connection import ClientError
from gangway.cluster.haproxy_config import socket_of

SEARCHED = "/usr/sbin:/usr/local/sbin"  # often not on a user's path
STOP_TIMEOUT_S = 30.0  # as long as a server has to finish its requests
COMMAND_TIMEOUT_S = 5.0
LONGEST_SOCKET_PATH = 107 - len(".sock.12345.tmp")  # bytes; HAProxy binds beside it first


class RouterError(ClientError):
    """HAProxy is not there, does not answer, or does not take its configuration."""


class Haproxy:
    """A running HAProxy: a master, and a worker that carries the calls. Raises RouterError if there is none."""

    def __init__(self, config: Path) -> None:
        self._config = config
        check_config(config)
        self._log = config.with_name("haproxy.log")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([find_haproxy(), "-W", "-f", str(config)], stderr=log)

    def look(self) -> None:
        """Raise RouterError, with HAProxy's own words, if it has ended."""
        if (status := self._process.poll()) is not None:
            alerts = [line for line in self._log.read_text(errors="replace").splitlines() if "[ALERT]" in line]
            raise RouterError("\n".join((f"haproxy ended with status {status}", *alerts[:5])))

    def reload(self) -> None:
        """Let a new worker listen, and the former one end with its last call. Raises RouterError."""
        check_config(self._config)
        self._process.send_signal(signal.SIGUSR2)

    def stop(self) -> None:
        """Accept no more calls, finish those under way, and return when all is over."""
        self._process.send_signal(signal.SIGUSR1)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


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
