"""Calls of both protocols, one after the other from several threads, while something happens to the servers."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.http as triton_http

from testing.waiting import until

THREADS = 2  # for each protocol
TIMEOUT_S = 20
PAUSE_S = 0.002  # so that the calls last as long as what happens


def simple_inputs(module: Any = triton) -> list[Any]:
    """Return the inputs of `simple`."""
    inputs = [module.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.ones((1, 16), np.int32))
    return inputs


class SteadyCalls:
    """Calls under way. `answered` and `errors`: by protocol."""

    def __init__(self) -> None:
        self.answered = {"grpc": 0, "http": 0}
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def wait_for(self, count: int) -> None:
        """Return when so many calls more have been answered by each protocol."""
        before = dict(self.answered)
        until(
            lambda: all(self.answered[protocol] >= before[protocol] + count for protocol in before),
            lambda: f"{self.answered} {self.errors}",
        )

    def run(self, protocol: str, address: str, model: str) -> None:
        """Call until the end."""
        module: Any = triton if protocol == "grpc" else triton_http
        timeout = {"client_timeout": TIMEOUT_S} if protocol == "grpc" else {}
        client, inputs = module.InferenceServerClient(address), simple_inputs(module)
        while not self._ending.is_set():
            try:
                answer = client.infer(model, inputs, **timeout).as_numpy("OUTPUT0")
                error = "" if (answer == 2).all() else f"{protocol}: {answer}"
            except Exception as caught:  # of any kind: it is counted
                error = f"{protocol}: {caught}"
            with self._lock:
                self.answered[protocol] += not error
                self.errors += [error] if error else []
            time.sleep(PAUSE_S)
        client.close()

    def end(self) -> None:
        """Let no call begin any more."""
        self._ending.set()


@contextmanager
def steady_calls(grpc_address: str, http_address: str, model: str = "simple") -> Iterator[SteadyCalls]:
    """Call a model until the block ends; then all calls have ended."""
    calls = SteadyCalls()
    threads = [
        threading.Thread(target=calls.run, args=(protocol, address, model))
        for protocol, address in (("grpc", grpc_address), ("http", http_address))
        for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield calls
    finally:
        calls.end()
        for thread in threads:
            thread.join()
