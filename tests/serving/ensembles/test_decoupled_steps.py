"""Ensembles with decoupled steps: how often the others run, in which order there are answers, and how errors end them.

The answers are those of Triton 2.51, but for their order, which is that of the responses here, and for errors: what
precedes one is answered.
"""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from testing.waiting import until
from tests.helpers import adder_models, ensemble_configs
from tests.helpers.python_models import TEXTS, config_of
from tests.helpers.served import TIMEOUT_S, Served, inputs_of, serving
from tests.helpers.stream_models import (
    DECOUPLED,
    NOT_ONE,
    RELAY,
    SCRIPT,
    Response,
    generated,
    streamed,
    text_request,
    write_text_model,
)

pytestmark = pytest.mark.long
X, Y = TEXTS
EMPTY_FINAL = {"triton_enable_empty_final_response": True}


def sends(words: str, last: str) -> str:
    """A body that answers with the text and each of these letters behind it."""
    return f"""
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for letter in "{words}":
                sender.send(answer(text(request) + letter))
            {last}
"""


def answers(expression: str) -> str:
    """A body that answers once; `#` in the text is an error, "slow" takes its time, "meets" waits for another one."""
    return f"""
    def execute(self, requests):
        import os
        found = []
        for request in requests:
            x = text(request)
            if "slow" in x:
                time.sleep(0.3)
            if "meets" in x:
                open(x, "w").close()
                while sum("meets" in name for name in os.listdir()) < 2:
                    time.sleep(0.005)
            found.append(error("not " + x) if "#" in x else answer({expression}))
        return found
"""


PAIR = """
    def execute(self, requests):
        return [answer(text(request, "a") + "+" + text(request, "b")) for request in requests]
"""
NUMBERS = """
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            sender = request.get_response_sender()
            for number in range(int(x[0, 0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + np.float32(number))]))
            sender.send(flags=FINAL)
"""
TWO = "instance_group { count: 2 }"
STEPS: dict[str, tuple[str, Sequence[tuple[str, str, str]]]] = {
    "plain": (Y, [("tag", "x=x", "y=t"), ("tag", "x=t", "y=y")]),
    "last": (Y, [("tag", "x=x", "y=t"), ("split", "x=t", "y=y")]),
    "only": (Y, [("script", "x=x", "y=y")]),
    "first": (Y, [("split", "x=x", "y=t"), ("tag", "x=t", "y=y")]),
    "both": (Y, [("split", "x=x", "y=t"), ("letters", "x=t", "y=y")]),
    "fork": (Y, [("split", "x=x", "y=s"), ("tag", "x=s", "y=t"), ("round", "x=s", "y=u"), ("pair", "a=t b=u", "y=y")]),
    "nested": (Y, [("tag", "x=x", "y=t"), ("first", "x=t", "y=y")]),
    "with_the_request": (Y, [("split", "x=x", "y=s"), ("pair", "a=s b=x", "y=y")]),
    "with_another_step": (Y, [("round", "x=x", "y=t"), ("split", "x=x", "y=s"), ("pair", "a=s b=t", "y=y")]),
    "with_an_outer_step": (
        Y,
        [("split", "x=x", "y=s"), ("tag", "x=s", "y=t"), ("letters", "x=s", "y=u"), ("pair", "a=t b=u", "y=y")],
    ),
    "two_outputs": (f"{Y} z:STRING:1", [("split", "x=x", "y=y"), ("tag", "x=y", "y=z")]),
    "an_output_of_before": (f"{Y} z:STRING:1", [("split", "x=x", "y=y"), ("round", "x=x", "y=z")]),
    "script_and_tag": (Y, [("script", "x=x", "y=t"), ("tag", "x=t", "y=y")]),
    "script_and_letters": (Y, [("script", "x=x", "y=t"), ("letters", "x=t", "y=y")]),
    "scripts": (Y, [("script", "x=x", "y=t"), ("script", "x=t", "y=y")]),
    "several": (Y, [("script", "x=x", "y=t"), ("braces", "x=t", "y=y")]),
}
EACH: dict[str, list[str]] = {
    "plain": ["<<q>>"],
    "last": ["<q>1", "<q>2"],
    "first": ["<q1>", "<q2>"],
    "both": ["q1a", "q1b", "q1c", "q2a", "q2b", "q2c"],
    "fork": ["<q1>+(q1)", "<q2>+(q2)"],
    "nested": ["<<q>1>", "<<q>2>"],
    "with_the_request": ["q1+q", "q2+q"],
    "with_another_step": ["q1+(q)", "q2+(q)"],
    "with_an_outer_step": ["<q1>+q1a", "<q1>+q1b", "<q1>+q1c", "<q2>+q2a", "<q2>+q2b", "<q2>+q2c"],
    "two_outputs": ["q1 <q1>", "q2 <q2>"],
    "an_output_of_before": ["q1 (q)", "q2 (q)"],
}
# Of ensembles whose first step executes the text.
SCRIPTED = [
    ("only", "a b", ["a", "b"]),
    ("only", "", []),
    ("only", "a !e b", ["a", "!in ensemble 'only', step 0 ('script'): e"]),
    ("only", "$!e", ["!in ensemble 'only', step 0 ('script'): e"]),
    ("script_and_tag", "a b c", ["<a>", "<b>", "<c>"]),
    ("script_and_tag", "a $b", ["<a>", "<b>"]),
    ("script_and_tag", "", []),
    ("script_and_tag", "!e", ["!in ensemble 'script_and_tag', step 0 ('script'): e"]),
    ("script_and_tag", "a !e b", ["<a>", "!in ensemble 'script_and_tag', step 0 ('script'): e"]),
    ("script_and_tag", "a # b", ["<a>", "!in ensemble 'script_and_tag', step 1 ('tag'): not #"]),
    ("script_and_tag", "# !e", ["!in ensemble 'script_and_tag', step 1 ('tag'): not #"]),
    ("script_and_letters", "a b", ["aa", "ab", "ac", "ba", "bb", "bc"]),
    ("script_and_letters", "a !e", ["aa", "ab", "ac", "!in ensemble 'script_and_letters', step 0 ('script'): e"]),
    ("scripts", "a !e", ["a", "!in ensemble 'scripts', step 0 ('script'): e"]),
    ("several", "slow a # b", ["{slow}", "{a}", "!in ensemble 'several', step 1 ('braces'): not #"]),
    ("several", "a b slow c d e", ["{a}", "{b}", "{slow}", "{c}", "{d}", "{e}"]),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    write_text_model(repository, "script", SCRIPT, more=DECOUPLED)
    write_text_model(repository, "split", sends("12", "sender.send(flags=FINAL)"), more=DECOUPLED)
    letters = sends("ab", 'sender.send(answer(text(request) + "c"), FINAL)')
    write_text_model(repository, "letters", letters, more=DECOUPLED)
    write_text_model(repository, "tag", answers('f"<{x}>"'))
    write_text_model(repository, "round", answers('f"({x})"'))
    write_text_model(repository, "braces", answers('"{" + x + "}"'), more=TWO)
    write_text_model(repository, "pair", PAIR, "a:STRING:1 b:STRING:1")
    write_text_model(repository, "relay", RELAY)
    for name, (outputs, steps) in STEPS.items():
        ensemble_configs.write(repository, name, ensemble_configs.config_of(X, outputs, steps, batch=0))
    more = "model_transaction_policy { decoupled: true }"
    plain = ensemble_configs.config_of(*TEXTS, STEPS["plain"][1], batch=0, more=more)
    ensemble_configs.write(repository, "said_to_be_decoupled", plain)
    write_text_model(repository, "numbers", NUMBERS)
    (repository / "numbers" / "config.pbtxt").write_text(config_of("x:FP32:1,4", "y:FP32:1,4", more=DECOUPLED))
    adder_models.write(repository, "add", 2, config='max_batch_size: 0 input { name: "x" dims: [-1, 4] }')
    steps = [("numbers", "x=x", "y=s"), ("add", "x=s", "y=y")]
    ensemble_configs.write(repository, "added", ensemble_configs.config_of("x:FP32:1,4", "y:FP32:1,4", steps, batch=0))
    file = repository.parent / "trace.json"
    with serving(repository, f"--trace-config=triton,file={file}", cwd=repository.parent) as served:
        yield served


def words_over(served: Served, path: str, name: str, text: str) -> list[str]:
    """What a client gets of an ensemble over one of the ways."""
    if path == "gRPC":
        return [each.word for each in streamed(served.server.url, text_request(name, text))]
    if path == "HTTP":
        answer = generated(served.server.http_url, name, text)
        return answer.words if answer.is_stream else [f"!{answer.content['error']}"]
    (relayed,) = streamed(served.server.url, text_request("relay", f"{name} {text}"))
    return [relayed.word]


@pytest.mark.parametrize("name", EACH)
def test_each_response_is_followed_by_a_run_of_what_follows(served: Served, name: str) -> None:
    found = streamed(served.server.url, text_request(name, "q"))
    assert [each.word for each in found] == EACH[name]
    assert not any(each.is_final for each in found[:-1])
    with_end = streamed(served.server.url, text_request(name, "q", **EMPTY_FINAL))
    assert [each.word for each in with_end if each.word] == EACH[name]
    assert [each.is_final for each in with_end] == [False] * (len(with_end) - 1) + [True]


@pytest.mark.parametrize(("name", "text", "wanted"), SCRIPTED)
@pytest.mark.parametrize("path", ["gRPC", "HTTP"])
def test_order_and_errors(served: Served, name: str, text: str, wanted: list[str], path: str) -> None:
    assert words_over(served, path, name, text) == wanted


@pytest.mark.parametrize("name", ["last", "first", "both", "fork"])
def test_other_models_ask_for_them(served: Served, name: str) -> None:
    assert words_over(served, "BLS", name, "q") == [" ".join(EACH[name])]


def test_the_last_step_marks_the_last_response(served: Served) -> None:
    assert streamed(served.server.url, text_request("only", "a $b")) == [Response("a", False), Response("b", True)]
    assert streamed(served.server.url, text_request("only", "a b")) == [Response("a", False), Response("b", False)]
    found = streamed(served.server.url, text_request("only", "a b", **EMPTY_FINAL))
    assert found == [Response("a", False), Response("b", False), Response("", True)]
    assert streamed(served.server.url, text_request("only", "a !e"))[-1].is_final


@pytest.mark.parametrize("outputs", [["y"], ["z"], ["z", "y"]])
@pytest.mark.parametrize("name", ["two_outputs", "an_output_of_before"])
def test_only_the_wanted_outputs(served: Served, name: str, outputs: list[str]) -> None:
    request = text_request(name, "q")
    for output in outputs:
        request.outputs.add(name=output)
    whole = [dict(zip("yz", word.split(), strict=True)) for word in EACH[name]]
    wanted = [" ".join(each[output] for output in outputs) for each in whole]
    if (name, outputs) == ("an_output_of_before", ["z"]):
        wanted = wanted[:1]  # no decoupled step is needed
    assert [each.word for each in streamed(served.server.url, request)] == wanted


def test_one_answer_over_generate(served: Served) -> None:
    assert generated(served.server.http_url, "only", "a", "generate").content["y"] == "a"
    answer = generated(served.server.http_url, "script_and_tag", "a", "generate")
    assert answer.content["y"] == "<a>"
    for text in ("a b", ""):
        answer = generated(served.server.http_url, "script_and_tag", text, "generate")
        assert (answer.status, answer.content) == (400, {"error": NOT_ONE})
    answer = generated(served.server.http_url, "script_and_tag", "!e", "generate")
    assert (answer.status, answer.content["error"]) == (500, "in ensemble 'script_and_tag', step 0 ('script'): e")


@pytest.mark.parametrize("name", ["last", "first", "nested"])
def test_other_methods_are_refused(served: Served, name: str) -> None:
    with pytest.raises(InferenceServerException, match=r"UNIMPLEMENTED.*is decoupled"):
        served.infer(name, x=np.array([b"q"], dtype=object))
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["q"]}]}
    with closing(HTTPConnection(served.server.http_url, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", f"/v2/models/{name}/infer", json.dumps(body))
        assert connection.getresponse().status == 501


def test_whether_an_ensemble_is_decoupled_follows_from_its_steps(served: Served) -> None:
    for name, is_decoupled in (("first", True), ("nested", True), ("plain", False), ("said_to_be_decoupled", False)):
        config = served.client.get_model_config(name).config
        assert config.model_transaction_policy.decoupled == is_decoupled
    assert served.infer("said_to_be_decoupled", x=np.array([b"q"], dtype=object))["y"] == [b"<<q>>"]


@pytest.mark.parametrize("name", ["script_and_tag", "several"])
def test_many_responses(served: Served, name: str) -> None:
    script = " ".join(map(str, range(300)))
    ends = "<>" if name == "script_and_tag" else "{}"
    wanted = [f"{ends[0]}{number}{ends[1]}" for number in range(300)]
    assert words_over(served, "gRPC", name, script) == wanted
    assert words_over(served, "HTTP", name, script) == wanted


def test_many_responses_of_many_responses(served: Served) -> None:
    script = " ".join(map(str, range(60)))
    wanted = [f"{number}{letter}" for number in range(60) for letter in "abc"]
    assert words_over(served, "gRPC", "script_and_letters", script) == wanted


def test_large_tensors(served: Served) -> None:
    wanted = [f"<{'x' * 2_000_000}>", "<a>", f"<{'x' * 40_000}>"]
    assert words_over(served, "gRPC", "script_and_tag", "*2000000 a *40000") == wanted


def test_several_runs_go_on_at_the_same_time(served: Served) -> None:
    """Two instances take their turns, while the answers keep the order."""
    assert words_over(served, "gRPC", "several", "meets1 meets2 meets3") == ["{meets1}", "{meets2}", "{meets3}"]


def test_answers_come_while_others_are_computed(served: Served) -> None:
    times = []
    call = triton.InferenceServerClient(served.server.url)
    call.start_stream(lambda result, error: times.append(time.monotonic()))
    call.async_stream_infer("script_and_tag", inputs_of({"x": np.array([b"a ~0.5 b"], dtype=object)}))
    until(lambda: len(times) == 2)
    call.close()
    assert times[1] - times[0] > 0.3


@pytest.mark.parametrize("count", [0, 1, 7])
def test_compiled_models_follow(served: Served, count: int) -> None:
    with triton_http.InferenceServerClient(served.server.http_url) as client:
        assert client.is_model_ready("added")
    found: list[float] = []
    ended: list[bool] = []

    def take(result: triton.InferResult, error: object) -> None:
        y = result.as_numpy("y")
        if y is not None:
            found.append(float(y[0, 0]))
        if result.get_response().parameters["triton_final_response"].bool_param:
            ended.append(True)

    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(take)
        x = inputs_of({"x": np.full((1, 4), count, np.float32)})
        client.async_stream_infer("added", x, enable_empty_final_response=True)
        until(lambda: ended)
    assert found == [count + number + 2 for number in range(count)]


@pytest.mark.parametrize("name", ["only", "script_and_tag", "script_and_letters"])
@pytest.mark.parametrize("path", ["gRPC", "HTTP"])
def test_clients_that_go_cancel_all_steps(served: Served, name: str, path: str) -> None:
    noticed = served.log().count("noticed that it is cancelled")
    script = "a " + "~0.05 " * 200
    if path == "gRPC":
        first: list[object] = []
        client = triton.InferenceServerClient(served.server.url)
        client.start_stream(lambda result, error: first.append(result))
        client.async_stream_infer(name, inputs_of({"x": np.array([script.encode()], dtype=object)}))
        until(lambda: first)
        client.stop_stream(cancel_requests=True)
        client.close()
    else:
        with closing(HTTPConnection(served.server.http_url, timeout=TIMEOUT_S)) as connection:
            connection.request("POST", f"/v2/models/{name}/generate_stream", json.dumps({"x": script}))
            assert connection.getresponse().read(20)
    until(lambda: served.log().count("noticed that it is cancelled") > noticed)
    until(lambda: served.server.busy_slots() == 0)


def test_a_deadline_ends_all_steps(served: Served) -> None:
    from tests.helpers.raw_stream import RawStream

    with RawStream(served.server.url, timeout_s=0.4) as stream:
        stream.send(text_request("script_and_tag", "a " + "~0.05 " * 200))
        assert stream.receive().infer_response.outputs
        with pytest.raises(grpc.RpcError) as caught:
            stream.receive()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: served.server.busy_slots() == 0)


def counts(served: Served, *names: str) -> dict[str, tuple[int, int]]:
    """(successes, failures) of models."""
    found = {}
    for name in names:
        statistics = served.client.get_inference_statistics(name).model_stats[0].inference_stats
        found[name] = (statistics.success.count, statistics.fail.count)
    return found


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("first", "q", {"first": (1, 0), "split": (1, 0), "tag": (2, 0)}),
        ("script_and_tag", "", {"script_and_tag": (1, 0), "script": (1, 0), "tag": (0, 0)}),
        # The error comes after the end of `script`, which would count as failed if the ensemble ended before it.
        ("script_and_tag", "a $#", {"script_and_tag": (0, 1), "script": (1, 0), "tag": (1, 1)}),
        ("script_and_tag", "a $!e", {"script_and_tag": (0, 1), "script": (0, 1), "tag": (1, 0)}),
        ("nested", "q", {"nested": (1, 0), "first": (1, 0), "split": (1, 0), "tag": (3, 0)}),
    ],
)
def test_what_is_counted(served: Served, name: str, text: str, wanted: dict[str, tuple[int, int]]) -> None:
    before = counts(served, *wanted)
    streamed(served.server.url, text_request(name, text))

    def counted() -> dict[str, tuple[int, int]]:
        after = counts(served, *wanted)
        return {key: (after[key][0] - before[key][0], after[key][1] - before[key][1]) for key in wanted}

    until(lambda: counted() == wanted)


def test_clients_that_come_and_go_leave_nothing_behind(served: Served) -> None:
    """Some read all, some go after some bytes, while steps run, wait for an instance, or fail."""
    scripts = ["a b c", "a ~0.02 b ~0.02 c", "a # b", "!e", " ".join(map(str, range(100))), "slow a b", "*300000 a"]

    def ask(number: int) -> None:
        name = ("only", "script_and_tag", "script_and_letters", "several", "scripts")[number % 5]
        with closing(HTTPConnection(served.server.http_url, timeout=TIMEOUT_S)) as connection:
            body = json.dumps({"x": scripts[number % len(scripts)]})
            connection.request("POST", f"/v2/models/{name}/generate_stream", body)
            if number % 3:
                connection.getresponse().read(None if number % 3 == 1 else number % 120)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(120)))
    until(lambda: served.server.busy_slots() == 0)
    assert words_over(served, "HTTP", "script_and_letters", "a") == ["aa", "ab", "ac"]
    assert "internal error" not in served.log()
    assert "a fault of the server" not in served.log()


def test_the_trace_has_each_run_of_a_step(served: Served) -> None:
    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "1"}
    served.client.update_trace_settings("first", settings)
    streamed(served.server.url, text_request("first", "q"))
    file = served.repository.parent / "trace.json"
    until(lambda: file.exists() and file.read_text().rstrip().endswith("]"))
    models = [each["model_name"] for each in json.loads(file.read_text()) if "model_name" in each]
    assert models[0] == "first"
    assert sorted(models[1:]) == ["split", "tag", "tag"]  # as they end: the first answer's may end before `split` does
