"""`gangway serve` with models that keep state: the clients that people use, all protocols, faults in the middle."""

import json
import os
import signal
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.clients.connection import SERVICE
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.protos import grpc_service_pb2 as pb
from gangway.zoo import write_model
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers import onnx_text
from tests.helpers.http_requests import ask_http
from tests.helpers.sequence_models import Sums, number, run_stream, run_unary
from tests.helpers.served import serving

TIMEOUT_S = 60
ZOO = ("simple_sequence", "simple_dyna_sequence", "simple_string_dyna_sequence")
IDLE_US = 100_000
NEVER_US = 600_000_000
STATE = 'state { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ] }'
ROWS = STATE.replace("[ 1 ]", "[ -1, 1 ]")  # of a model without max_batch_size
TENSORS = 'input { name: "INPUT" } output { name: "OUTPUT" } '
WARM_UP = """ model_warmup { name: "w" batch_size: 1 inputs { key: "INPUT" value {
    data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } }"""
BEGIN = np.array([2.5, -1], np.float32)


# HISTORY_OUT = HISTORY_IN and x behind it; FLAGS = the controls.
HISTORY = """(float[1, 1] x, float[1, L] HISTORY_IN, float[1] START, bool[1] END, int32[1] READY, int64[1] CORRID)
=> (float[1, M] HISTORY_OUT, float[4] FLAGS) {
    HISTORY_OUT = Concat<axis=1>(HISTORY_IN, x)
    start = Cast<to=1>(START)
    end = Cast<to=1>(END)
    ready = Cast<to=1>(READY)
    id = Cast<to=1>(CORRID)
    FLAGS = Concat<axis=0>(start, end, ready, id)
}"""
HISTORY_CONFIG = """input { name: "x" } output { name: "HISTORY_OUT" } output { name: "FLAGS" }
sequence_batching {
    max_sequence_idle_microseconds: 600000000
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ -1, 0.5 ] } }
    control_input { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ true, false ] } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 3, 4 ] } }
    control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
    state {
        input_name: "HISTORY_IN" output_name: "HISTORY_OUT" data_type: TYPE_FP32 dims: [ 1, -1 ]
        initial_state { name: "begin" data_type: TYPE_FP32 dims: [ 1, 2 ] data_file: "begin" }
    }
}"""


def config_of(batch: int, strategy: str, idle_us: int, state: str = STATE, count: int = 1) -> str:
    batching = f"sequence_batching {{ {strategy} max_sequence_idle_microseconds: {idle_us} {state} }}"
    return f"max_batch_size: {batch} instance_group {{ count: {count} }} {TENSORS} {batching}"


# What uses the accumulator: slots, and when a silent sequence ends.
CONFIGS = {
    "sums": config_of(8, "direct { }", NEVER_US, count=4) + WARM_UP,
    "brief": config_of(8, "oldest { max_candidate_sequences: 4 }", IDLE_US),
    "narrow": config_of(0, "direct { }", NEVER_US, ROWS),
}


@pytest.fixture(scope="module")
def served(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sums]:
    repository = tmp_path_factory.mktemp("models")
    for name in ZOO:
        write_model(repository, name)
    source = write_model(tmp_path_factory.mktemp("zoo"), "accumulator") / "1" / "model.onnx"
    for name, config in CONFIGS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.onnx").write_bytes(source.read_bytes())
        (repository / name / "config.pbtxt").write_text(config)
    onnx_text.save(repository, "history", HISTORY, HISTORY_CONFIG)
    (repository / "history" / "initial_state").mkdir()
    (repository / "history" / "initial_state" / "begin").write_bytes(BEGIN.tobytes())
    for name in (*ZOO, "history", "sums"):
        path = repository / name / "1" / "model.onnx"
        compile_model(path, name, Cache(compiled_zoo.cache_dir), detect(), lambda *_: None)
    flags = (f"--cache-dir={compiled_zoo.cache_dir}", "--model-control-mode=explicit", "--load-model=*")
    with serving(repository, *flags, "--max-shapes=0", kind=Sums) as served:
        yield served


def test_what_clients_see_of_a_model(served: Sums) -> None:
    metadata = served.client.get_model_metadata("simple_dyna_sequence")
    assert [(tensor.name, list(tensor.shape)) for tensor in metadata.inputs] == [("INPUT", [-1, 1])]
    assert [tensor.name for tensor in metadata.outputs] == ["OUTPUT"]
    batching = served.client.get_model_config("simple_dyna_sequence").config.sequence_batching
    assert [control.name for control in batching.control_input] == ["START", "END", "READY", "CORRID"]
    assert batching.oldest.max_candidate_sequences == 1024
    assert served.client.get_model_config("brief").config.sequence_batching.max_sequence_idle_microseconds == IDLE_US
    assert "sequence" in served.client.get_server_metadata().extensions
    assert served.client.get_model_config("sums").config.parameters["gangway_engine"].string_value == "native"


def test_interleaved_sequences_have_the_right_sums_though_workers_are_killed(served: Sums) -> None:
    values = list(range(1, 31))
    url = served.server.url
    over_grpc = [partial(run_unary, url, triton, "sums", identity, values) for identity in (1, 2, 3, "1", "2")]
    identities = (2**64 - 1, "ü", 7, 8)
    over_http = [partial(run_unary, served.server.http_url, triton_http, "sums", each, values) for each in identities]
    streams = [partial(run_stream, url, "sums", each, values) for each in ([11, 12, 13], ["11", "a"])]
    expected = np.cumsum(values).tolist()
    with ThreadPoolExecutor(11) as pool:
        alone = [pool.submit(job) for job in over_grpc + over_http]
        several = [pool.submit(job) for job in streams]
        until(lambda: served.answered("sums") >= len(values))
        for pid in served.server.pids()["worker"]:
            os.kill(pid, signal.SIGKILL)
        found = [job.result(TIMEOUT_S) for job in alone]
        found += [sums for job in several for sums in job.result(TIMEOUT_S)]
    assert found == [expected] * 14
    assert served.answered("sums") == 14 * len(values)


def test_examples_of_triton(served: Sums) -> None:
    values = [11, 7, 5]
    add, last = served.add, len(values)
    for identity, name in ((1000, "simple_sequence"), ("uuid", "simple_sequence"), (1001, "simple_dyna_sequence")):
        answers = [add(name, identity, value, not index, index == last) for index, value in enumerate([100, *values])]
        assert answers == [101, 11, 7, 5 + (identity if "dyna" in name else 0)]
    name = "simple_string_dyna_sequence"
    answers = [add(name, "1002", value, not index, index == last) for index, value in enumerate([20, *values])]
    assert answers == [20, 31, 38, 43 + 1002]


def test_every_control_and_a_state_that_grows(served: Sums) -> None:
    seen = []
    for index, end in enumerate((False, False, True)):
        tensor = triton.InferInput("x", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[index]], np.float32))
        result = served.client.infer("history", [tensor], sequence_id=9, sequence_start=not index, sequence_end=end)
        seen.append((result.as_numpy("FLAGS").tolist(), result.as_numpy("HISTORY_OUT")[0].tolist()))
    assert seen == [
        ([0.5, 1, 4, 9], [2.5, -1, 0]),
        ([-1, 1, 4, 9], [2.5, -1, 0, 1]),
        ([-1, 0, 4, 9], [2.5, -1, 0, 1, 2]),
    ]


def test_a_silent_sequence_ends(served: Sums) -> None:
    assert served.add("brief", 1, 5, start=True) == 5
    time.sleep(1.5 * IDLE_US / 1e6)
    with pytest.raises(
        InferenceServerException, match="request for sequence 1 to model 'brief' must specify the START"
    ):
        served.add("brief", 1, 5)
    assert served.add("brief", 1, 5, start=True) == 5


def test_a_sequence_waits_for_the_only_slot(served: Sums) -> None:
    assert served.add("narrow", 1, 1, start=True) == 1
    with pytest.raises(
        InferenceServerException, match="timeout of the corresponding sequence has been expired"
    ) as error:
        served.client.infer("narrow", number(1), sequence_id=2, sequence_start=True, timeout=1000)
    assert error.value.status() == "StatusCode.UNAVAILABLE"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.add, "narrow", 2, 7, start=True)
        assert served.add("narrow", 1, 2) == 3
        assert not waiting.done()
        assert served.add("narrow", 1, 4, end=True) == 7
        assert waiting.result(TIMEOUT_S) == 7
    assert served.add("narrow", 2, 1, end=True) == 8


def test_loading_a_model_anew_ends_its_sequences(served: Sums) -> None:
    assert served.add("sums", 5, 3, start=True) == 3
    config = {
        "max_batch_size": 8,
        "input": [{"name": "INPUT", "data_type": "TYPE_INT32", "dims": [1]}],
        "output": [{"name": "OUTPUT", "data_type": "TYPE_INT32", "dims": [1]}],
        "sequence_batching": {
            "state": [{"input_name": "SUM_IN", "output_name": "SUM_OUT", "data_type": "TYPE_INT32", "dims": [1]}]
        },
    }
    served.client.load_model("sums", config=json.dumps(config))
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        served.add("sums", 5, 3)
    assert served.add("sums", 5, 4, start=True, end=True) == 4


def request_of(model: str, rows: int = 1, **parameters: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="INPUT", datatype="INT32", shape=[rows, 1])
    request.raw_input_contents.append(bytes(4 * rows))
    for name, (kind, value) in parameters.items():
        setattr(request.parameters[name], kind, value)
    return request


def with_control(request: pb.ModelInferRequest) -> pb.ModelInferRequest:
    request.inputs.add(name="START", datatype="INT32", shape=[1, 1])
    request.raw_input_contents.append(struct.pack("<i", 1))
    return request


FIVE, STARTS = ("int64_param", 5), ("bool_param", True)
WRONG = {
    "no id": (
        request_of("sums"),
        "inference request to model 'sums' must specify a non-zero or non-empty correlation ID",
    ),
    "id 0": (request_of("sums", sequence_id=("int64_param", 0), sequence_start=STARTS), "must specify a non-zero or"),
    "empty id": (request_of("sums", sequence_id=("string_param", "")), "must specify a non-zero or non-empty"),
    "long id": (request_of("sums", sequence_id=("string_param", "é" * 513)), "'sequence_id' has more than 1024 bytes"),
    "id that is no id": (
        request_of("sums", sequence_id=("bool_param", True)),
        "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
    ),
    "start that is no flag": (
        request_of("sums", sequence_id=FIVE, sequence_start=FIVE),
        "invalid value type for 'sequence_start' parameter, expected bool_param.",
    ),
    "not started": (
        request_of("sums", sequence_id=("int64_param", -2)),
        "inference request for sequence 18446744073709551614 to model 'sums' must specify the START flag on the first",
    ),
    "two rows": (
        request_of("sums", rows=2, sequence_id=FIVE, sequence_start=STARTS),
        "inference request to model 'sums' must specify batch-size 1 due to requirements of sequence batcher",
    ),
    "two rows without a batch": (
        request_of("narrow", rows=2, sequence_id=FIVE, sequence_start=STARTS),
        "inference request to model 'narrow' must specify batch-size 1",
    ),
    "a control": (
        with_control(request_of("simple_sequence", sequence_id=FIVE, sequence_start=STARTS)),
        "unexpected inference input 'START' for model 'simple_sequence'. Expected input(s) 'INPUT'",
    ),
    "an id that is no number": (
        request_of("simple_dyna_sequence", sequence_id=("string_param", "five"), sequence_start=STARTS),
        "sequence id 'five' for model 'simple_dyna_sequence' is a string, but control input 'CORRID' is TYPE_UINT64",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_refused(served: Sums, case: str) -> None:
    request, message = WRONG[case]
    with grpc.insecure_channel(served.server.url) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer", request_serializer=pb.ModelInferRequest.SerializeToString)
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=TIMEOUT_S)
    assert (caught.value.code(), message in caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_refused_over_http(served: Sums) -> None:
    body = {"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}
    answer = ask_http(served.server.http_url, "POST", "/v2/models/sums/infer", body)
    assert (answer.status, "non-zero or non-empty correlation ID" in answer.content["error"]) == (400, True)
    body["parameters"] = {"sequence_id": 2**63, "sequence_start": False}
    answer = ask_http(served.server.http_url, "POST", "/v2/models/sums/infer", body)
    assert (answer.status, "for sequence 9223372036854775808 to" in answer.content["error"]) == (400, True)


def test_a_client_that_goes_while_it_waits(served: Sums) -> None:
    """Its place in the backlog is free, and its sequence has not begun."""
    assert served.add("narrow", 1, 1, start=True) == 1
    with grpc.insecure_channel(served.server.url) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer", request_serializer=pb.ModelInferRequest.SerializeToString)
        waiting = call.future(request_of("narrow", sequence_id=FIVE, sequence_start=STARTS), timeout=0.05)
        assert waiting.exception(TIMEOUT_S).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.add("narrow", 1, 1, end=True) == 2
    assert served.add("narrow", 6, 1, start=True, end=True) == 1  # so that 5 would have had its turn
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        served.add("narrow", 5, 1)
