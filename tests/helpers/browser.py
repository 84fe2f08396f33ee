"""A real browser: Chromium without a window, driven by its DevTools protocol over a pair of pipes."""

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from testing.waiting import until

CHROMIUM: Final = Path("/usr/bin/chromium")  # of Debian's package
FLAGS: Final = "--headless --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage --remote-debugging-pipe"


class Browser:
    """One page of a browser.

    `faults`: what its console has said of errors, refusals of its policy among them. `asked`: the addresses of all
    requests that it has made.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to = to_browser
        self._from = from_browser
        self._rest = b""
        self._number = 0
        self._session = ""
        self.faults: list[str] = []
        self.asked: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol; return its result. Raises RuntimeError with the browser's words."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 16)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        match event.get("method"):
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.faults.append(event["params"]["entry"]["text"])
            case "Network.requestWillBeSent":
                self.asked.append(event["params"]["request"]["url"])
            case "Runtime.exceptionThrown":
                self.faults.append(event["params"]["exceptionDetails"]["exception"]["description"])

    def open(self, address: str) -> None:
        """Go to a page."""
        self.ask("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """Return what JavaScript says, once its promise is kept."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Return what JavaScript says, as soon as it is true, on this page or one that it leads to."""
        found: list[Any] = []

        def is_true() -> bool:
            with suppress(RuntimeError):  # the page is being left, or has no such name yet
                found[:] = [self.value(expression)]
            return bool(found and found[0])

        until(is_true)
        return found[0]

    def choose_file(self, selector: str, path: Path) -> None:
        """Give an input of the page a file, as a user does."""
        root = self.ask("DOM.getDocument")["root"]["nodeId"]
        node = self.ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.ask("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def look(self, width: int, scheme: str) -> None:
        """Make the page so many pixels wide, and have it in the colours of a scheme, light or dark."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self) -> bytes:
        """Return the whole page as PNG."""
        taken = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run Chromium with a profile of its own until the block ends."""
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    command = f'exec {CHROMIUM} {FLAGS} --user-data-dir="$0" 3<&{from_us} 4>&{to_us}'
    process = subprocess.Popen(["bash", "-c", command, profile], pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL)
    os.close(from_us)
    os.close(to_us)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.close(to_browser)  # which ends it
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        os.close(from_browser)
