"""What public model.py files call of `triton_python_backend_utils`, called in an instance, and what they get."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate import OWN_METHODS, PB_UTILS
from tests.helpers.python_models import HEAD, config_of, executes, write
from tests.helpers.served import Served, serving

pytestmark = pytest.mark.long

CONFIG = "json.loads(model.args['model_config'])"
KEEPS = """
    @staticmethod
    def auto_complete_config(config):
        before = config.as_dict()["max_batch_size"]
        config.set_max_batch_size(before)
        config.add_input({"name": "x", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_STRING", "dims": [1]})
        config.set_model_transaction_policy({"decoupled": False})
        return config

    def initialize(self, args):
        self.args = args
"""
ECHO = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
ASKED = "pb.InferenceRequest(model_name='echo', requested_output_names=['y'], inputs=[pb.Tensor('x', X)])"
RESPONSE = "pb.InferenceResponse([pb.Tensor('y', X)], parameters={'k': 1})"
# By what they show: an expression, and what the model answers.
CALLS: dict[str, tuple[str, object]] = {
    "name and array": ("[(t := pb.Tensor('a', X)).name(), t.as_numpy().tolist()]", ["a", [b"x", b"y"]]),
    "shape and type": (
        "[(t := pb.Tensor('a', np.zeros((2, 3)))).shape(), t.triton_dtype(), t.is_cpu()]",
        [[2, 3], 12, True],
    ),
    "to DLPack and back": (
        "pb.Tensor.from_dlpack('a', pb.Tensor('b', np.arange(3.0)).to_dlpack()).as_numpy().tolist()",
        [0.0, 1.0, 2.0],
    ),
    "an input": ("pb.get_input_tensor_by_name(request, 'x').shape()", [1]),
    "no input": ("pb.get_input_tensor_by_name(request, 'z')", None),
    "inputs": ("[t.name() for t in request.inputs()]", ["x"]),
    "an output": (f"pb.get_output_tensor_by_name({RESPONSE}, 'y').name()", "y"),
    "no output": (f"pb.get_output_tensor_by_name({RESPONSE}, 'z')", None),
    "outputs": (f"[t.name() for t in {RESPONSE}.output_tensors()]", ["y"]),
    "parameters of a response": (f"{RESPONSE}.parameters()", '{"k":1}'),
    "no error": (f"[(r := {RESPONSE}).has_error(), r.error()]", [False, None]),
    "an error": (
        "[(r := pb.InferenceResponse([], pb.TritonError('no', pb.TritonError.NOT_FOUND))).has_error(),"
        " r.error().message(), r.error().code()]",
        [True, "no", 2],
    ),
    "codes of errors": ("[pb.TritonError.UNKNOWN, pb.TritonError.INTERNAL, pb.TritonError.CANCELLED]", [0, 1, 7]),
    "an exception": ("isinstance(pb.TritonModelException('no'), Exception)", True),
    "what a request says": (
        "[request.request_id(), request.correlation_id(), request.flags(), request.timeout(), request.parameters(),"
        " request.requested_output_names(), request.is_cancelled(), request.priority()]",
        ["", 0, 0, 0, "{}", ["y"], False, 0],
    ),
    "flags": (
        f"(r := {ASKED}).set_flags(pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START) or"
        " [r.flags(), r.model_name(), r.model_version(), r.preferred_memory()]",
        [1, "echo", -1, None],
    ),
    "release flags": ("request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_ALL)", None),
    "preferred memory": (
        "isinstance(pb.PreferredMemory(pb.TRITONSERVER_MEMORY_GPU, 0), pb.PreferredMemory)"
        " and pb.MemoryType.TRITONSERVER_MEMORY_CPU == pb.TRITONSERVER_MEMORY_CPU"
        " and (int(pb.TRITONSERVER_MEMORY_GPU), int(pb.TRITONSERVER_MEMORY_CPU)) == (0, 1)",
        True,
    ),
    "a trace": ("[request.trace().get_context(), isinstance(request.trace(), pb.InferenceTrace)]", [None, True]),
    "a sender": (
        "[isinstance(s := request.get_response_sender(), pb.InferenceResponseSender), s.is_cancelled(),"
        " callable(s.send), pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL]",
        [True, False, True, 1],
    ),
    "another model": (f"{ASKED}.exec().output_tensors()[0].as_numpy().tolist()", [b"x", b"y"]),
    "a sequence that another model does not have": (
        f"{ASKED[:-1]}, correlation_id=7, flags=pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END).exec().has_error()",
        False,
    ),
    "responses of another model": (
        f"isinstance(i := {ASKED}.exec(decoupled=True), pb.ResponseIterator) and [len(r.output_tensors()) for r in i]",
        [1],
    ),
    "no further responses": (f"[(i := {ASKED}.exec(decoupled=True)).cancel(), list(i)]", [None, []]),
    "a coroutine": ("callable(request.async_exec)", True),
    "the folder": ("pb.get_model_dir() == f\"{model.args['model_repository']}/{model.args['model_version']}\"", True),
    "the folder, as the module is imported": ("FOLDER == pb.get_model_dir()", True),
    "an input's configuration": (f"pb.get_input_config_by_name({CONFIG}, 'x')['data_type']", "TYPE_STRING"),
    "an output's configuration": (f"pb.get_output_config_by_name({CONFIG}, 'y')['dims']", [1]),
    "no configuration": (
        f"[pb.get_input_config_by_name({CONFIG}, 'z'), pb.get_output_config_by_name({{}}, 'z')]",
        [None] * 2,
    ),
    "no decoupled model": (f"pb.using_decoupled_model_transaction_policy({CONFIG})", False),
    "a configuration": (
        "(c := pb.ModelConfig('{\"name\": \"m\"}')).set_dynamic_batching() or c.as_dict()['dynamic_batching']",
        {},
    ),
    "types by name": (
        "[pb.triton_string_to_numpy('TYPE_FP16').__name__, pb.TRITON_STRING_TO_NUMPY['TYPE_STRING'].__name__]",
        ["float16", "object_"],
    ),
    "types by number": ("[pb.triton_to_numpy_type(9).__name__, pb.numpy_to_triton_type(np.uint8)]", ["int64", 2]),
    "elements as bytes": ("pb.serialize_byte_tensor(X)", b"\1\0\0\0x\1\0\0\0y"),
    "bytes as elements": (
        "pb.deserialize_bytes_tensor(pb.serialize_byte_tensor(np.array([b'\\xff\\0', 'h\\u00e9'], object))).tolist()",
        [b"\xff\0", "h\u00e9".encode()],
    ),
    "a model that is ready": ("[pb.is_model_ready('echo'), pb.is_model_ready('echo', '2')]", [True, False]),
    "load and unload": (
        "[pb.load_model('spare'), pb.is_model_ready('spare'), pb.unload_model('spare'), pb.is_model_ready('spare')]",
        [None, True, None, False],
    ),
    "the log": (
        "[pb.Logger.log('a'), pb.Logger.log('b', pb.Logger.WARNING), pb.Logger.log_info('c'), pb.Logger.log_warn('d'),"
        " pb.Logger.log_error('e'), pb.Logger.log_verbose('f')]",
        [None] * 6,
    ),
    "a gauge": (
        "(m := (f := pb.MetricFamily(name='g', description='d', kind=pb.MetricFamily.GAUGE))"
        ".Metric(labels={'a': 'b'})).set(2) or m.increment(0.5) or [m.value(), isinstance(m, pb.Metric)]",
        [2.5, True],
    ),
    "a histogram": (
        "(h := pb.MetricFamily('h', 'd', pb.MetricKind.HISTOGRAM)).Metric(buckets=[1.0]).observe(2)",
        None,
    ),
    "the same module": ("__import__('c_python_backend_utils') is pb", True),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    names = '"request": request, "model": self, "np": np, "json": json, "FOLDER": FOLDER, "X": X'
    head = f"import json\n{HEAD.rstrip()}\nFOLDER = pb_utils.get_model_dir()\nX = np.array([b'x', b'y'], object)\n\n\n"
    write(repository, "calls", KEEPS + executes(names), 'backend: "python"', head)
    for name in ("echo", "spare"):
        write(repository, name, ECHO, config_of("x:STRING:-1", "y:STRING:-1"))
    flags = ["--model-control-mode=explicit"]
    flags += ["--load-model=calls", "--load-model=echo"]
    with serving(repository, *flags, cwd=repository.parent) as served:
        yield served


@pytest.mark.parametrize("what", CALLS)
def test_what_a_model_gets(served: Served, what: str) -> None:
    expression, expected = CALLS[what]
    assert served.executed("calls", f"found = ({expression})") == str(expected)


def test_everything_is_called() -> None:
    """The page has no name that is called nowhere here."""
    called = " ".join((KEEPS, *(expression for expression, _ in CALLS.values())))
    page = Path(__file__).parents[3] / "docs" / "reference" / "pb-utils.md"
    text = page.read_text()
    names = re.findall(r"^- `([\w.]+)`:", text, flags=re.MULTILINE)
    for listed in re.findall(r"^- as in Triton: (.*)$|Methods: (.*)$", text, flags=re.MULTILINE):
        names += re.findall(r"`([\w.]+)`", "".join(listed))
    assert [name for name in names if not re.search(rf"\b{name.rpartition('.')[2]}\b", called)] == []
    assert set(PB_UTILS) <= set(names)
    assert not {name.rpartition(".")[2] for name in names} & set(OWN_METHODS)
