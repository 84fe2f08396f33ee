"""Sends the steps of a case to one server, and says what it answered in a form that JSON can have."""

import http.client
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass

from benchmarks.differential.asked import (
    BINARY,
    JSON,
    SEGMENT,
    STREAM,
    Behind,
    Departs,
    Http,
    Infer,
    OnStream,
    Request,
    Rpc,
    Scrape,
    Shared,
    Step,
    Stranger,
    Together,
    Wait,
)
from benchmarks.differential.connections import TIMEOUT_S, Addresses, Messages
from benchmarks.differential.departing import depart
from benchmarks.differential.wire import Answer, error_of, http_answer, http_body, response_of
from gangway.protos import grpc_service_pb2 as pb

WAIT_S, POLL_S = 5, 0.05
BEHIND_S = 0.05  # until a request has come
# What varies from run to run: times, process ids, the server's version.
VOLATILE_KEYS = frozenset({"ns", "last_inference", "lastInference"})


class Client:
    """Asks one server."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._messages = Messages(addresses)
        self._segment = f"differential-{os.getpid()}"

    def close(self) -> None:
        """Let go of the connection."""
        self._messages.close()

    def ask(self, steps: Sequence[Step]) -> list[Answer]:
        """Return the answer to each step."""
        return [self._settled(self._step(step)) for step in steps]

    def _step(self, step: Step) -> Answer:
        match step:
            case Infer(request, way):
                return self._infer(request, way)
            case OnStream(requests, at_once):
                return self._on_stream(requests, at_once)
            case Together(requests, way):
                with ThreadPoolExecutor(len(requests)) as pool:
                    return list(pool.map(lambda request: self._infer(request, way), requests))
            case Behind(first, then, way):
                with ThreadPoolExecutor(1 + len(then)) as pool:
                    answers = []
                    for request in (first, *then):
                        answers.append(pool.submit(self._infer, request, way))
                        time.sleep(BEHIND_S)
                    return [answer.result() for answer in answers]
            case Http(verb, path, body, headers):
                return self._http(verb, path, body, headers)
            case Rpc(method, message):
                return self._rpc(method, message)
            case Scrape(names):
                return self._scrape(names)
            case Shared(content, steps):
                return self._shared(content, steps)
            case Departs():
                return depart(self._addresses, self._messages, step)
            case Stranger(who):
                with closing(Messages(self._addresses, who)) as messages:
                    return {"code": messages.unary("ServerLive", pb.ServerLiveRequest(), {}).get("code")}
            case Wait(inner, text):
                end_s = time.monotonic() + WAIT_S
                while text not in json.dumps(answer := self._step(inner)) and time.monotonic() < end_s:
                    time.sleep(POLL_S)
                return answer

    def _infer(self, request: Request, way: str) -> Answer:
        if way in (JSON, BINARY):
            body, headers = http_body(request, way)
            version = f"/versions/{request.version}" if request.version else ""
            return self._http("POST", f"/v2/models/{request.model}{version}/infer", body, headers)
        if way == STREAM:
            return self._on_stream([request], at_once=True)
        return self._messages.infer(request, way)

    def _shared(self, content: bytes, steps: Sequence[Http | Rpc | Wait]) -> Answer:
        path = Path("/dev/shm") / self._segment
        path.write_bytes(content)
        try:
            found = [self._step(step) for step in steps]
            return [*found, path.read_bytes().hex()]
        finally:
            path.unlink()

    def _rpc(self, method: str, message: Mapping[str, Any]) -> Answer:
        message = json.loads(json.dumps(message).replace(SEGMENT, self._segment))
        kind = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method].input_type
        return self._messages.unary(method, ParseDict(dict(message), GetMessageClass(kind)()), {})

    def _on_stream(self, requests: Sequence[Request], at_once: bool) -> Answer:
        """Send requests on a stream; those after the first one when the one before has its last answer."""
        queue: SimpleQueue[Request | None] = SimpleQueue()
        waiting = list(requests)

        def more(count: int) -> None:
            for request in waiting[:count]:
                queue.put(request)
            del waiting[:count]
            if not waiting:
                queue.put(None)

        headers = requests[0].headers if requests else {}
        more(len(waiting) if at_once else 1)
        answers: list[Answer] = []
        try:
            for message in self._messages.stream(iter(queue.get, None), headers):
                answer = response_of(message.infer_response)
                if message.error_message:
                    answer = {"error_message": message.error_message, **answer}
                answers.append(answer)
                final = message.infer_response.parameters.get("triton_final_response")
                if waiting and (final is None or final.bool_param):  # refusals do not have it
                    more(1)
        except grpc.RpcError as error:
            answers.append(error_of(error))
        return answers

    def _http(self, verb: str, path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).replace(SEGMENT, self._segment).encode()
        connection = self._addresses.connection()
        try:
            connection.request(verb, path, content or None, dict(headers))
            found = connection.getresponse()
            return http_answer(found, found.read())
        except (OSError, http.client.HTTPException) as error:
            return {"failed": type(error).__name__}
        finally:
            connection.close()

    def _scrape(self, names: Sequence[str]) -> Answer:
        connection = http.client.HTTPConnection(self._addresses.metrics_at, timeout=TIMEOUT_S)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return sorted(_sample(line) for line in lines if line.startswith(tuple(names)))

    def _settled(self, answer: Answer) -> Answer:
        """Return an answer without what varies."""
        if isinstance(answer, dict):
            return {
                key: 1 if key in VOLATILE_KEYS and value != "0" else self._settled(value)
                for key, value in answer.items()
            }
        if isinstance(answer, list):
            return [self._settled(each) for each in answer]
        if isinstance(answer, str):
            for old, new in {**self._addresses.renamed, self._segment: SEGMENT}.items():
                answer = answer.replace(old, new)
            answer = re.sub(r"\b0x[0-9a-f]{8,}", "0x0", answer)  # where an object lies
        return answer


def _sample(line: str) -> str:
    """Return a line of the metrics with its labels in order and its value as a float."""
    match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
    if match is None:
        return line
    labels = ",".join(sorted(re.findall(r'\w+="[^"]*"', match[2] or "")))
    return f"{match[1]}{{{labels}}} {float(match[3])}"
