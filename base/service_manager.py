"""What a service manager such as systemd is told of a server: the datagrams of sd_notify(3).

The manager names its socket in NOTIFY_SOCKET, and in WATCHDOG_USEC how long it waits for a sign of life.
"""

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

_SIGNS_PER_TIMEOUT: Final = 3


class ServiceManager:
    """Tells the manager that started this process how it gets on; without one, nothing is sent.

    The variables are taken out of `environment`, since they are not meant for child processes. The manager never
    delays the server: what its socket has no room for is lost, but for the word that the server is ready.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        path = environment.pop("NOTIFY_SOCKET", "")
        timeout_us = environment.pop("WATCHDOG_USEC", "")
        is_own = environment.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._sign_ns = int(timeout_us) * 1000 // _SIGNS_PER_TIMEOUT if timeout_us.isdecimal() and is_own else 0
        self._signed_ns = 0
        self._address = path.replace("@", "\0", 1) if path.startswith("@") else path  # "@" stands for abstract
        self._is_present = path.startswith(("/", "@"))
        self._unsent: tuple[str, ...] = ()

    def starting(self, status: str) -> None:
        """Say how far the start is."""
        self._send(f"STATUS={status}")

    def ready(self, status: str) -> None:
        """Say that the server answers requests; units that come after it may start."""
        self._unsent = ("READY=1", f"STATUS={status}")
        self._send_unsent()

    def stopping(self, status: str, within_s: float) -> None:
        """Say that the server ends, within this time."""
        self._send("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={round(within_s * 1e6)}")

    def alive(self) -> None:
        """Give a sign of life, if one is due. To be called several times within the manager's timeout."""
        self._send_unsent()
        now_ns = time.monotonic_ns()
        if self._sign_ns and now_ns - self._signed_ns >= self._sign_ns:
            self._signed_ns = now_ns
            self._send("WATCHDOG=1")

    def _send_unsent(self) -> None:
        if self._unsent and self._send(*self._unsent):
            self._unsent = ()

    def _send(self, *assignments: str) -> bool:
        """Return whether the manager's socket took it."""
        if self._is_present:
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as end:
                end.sendto("\n".join(assignments).encode(), self._address)
                return True
        return False
