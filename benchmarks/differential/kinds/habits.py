"""What model.py files of public repositories do besides: modules and files beside them, loops, pools, keywords."""

from collections.abc import Iterator

from benchmarks.differential.asked import GRPC, JSON, STREAM, Case, Infer, Request, by, doing, floats
from benchmarks.differential.models import Model, config_of, lambdas

HEAD = """from __future__ import annotations

import asyncio, concurrent.futures, dataclasses, functools, importlib, json, logging, os, subprocess, sys, tempfile, threading, time, warnings
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from base_model import BaseModel, NAMES
from helpers import shout
from helpers.more import deeper

sys.path.append(os.path.dirname(os.path.realpath(__file__)))
import late_module

logger = logging.getLogger(__name__)
logging.basicConfig(level=logging.INFO)
HERE = Path(__file__).parent


@dataclasses.dataclass
class Settings:
    threshold: float = 0.5
    names: list[str] = dataclasses.field(default_factory=list)


def ask(model, x, outputs=("y",), **more):
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=list(outputs), inputs=[x], **more)


def told(value):
    value = value if isinstance(value, (str, bytes)) else json.dumps(value)
    return pb_utils.Tensor("y", np.array([value], dtype=object))


class Mixed(BaseModel):
    @property
    def kind(self):
        return type(self).__name__


"""
FILES = {
    "1/base_model.py": """NAMES = ["a", "b"]


class BaseModel:
    def initialize(self, args):
        self.args = args
        self.prepare()

    def prepare(self):
        raise NotImplementedError
""",
    "1/helpers/__init__.py": "from .words import shout\n",
    "1/helpers/words.py": "def shout(text):\n    return text.upper()\n",
    "1/helpers/more.py": "from . import words\n\n\ndef deeper(text):\n    return words.shout(text) + '!'\n",
    "1/late_module.py": "VALUE = 'late'\n",
    "1/settings.json": '{"threshold": 0.25, "names": ["x"]}',
    "labels.txt": "one\ntwo\n",
}
SNIPPETS = {
    "file beside model.py": "(HERE / 'settings.json').read_text()",
    "file by arguments": "open(os.path.join(self.args['model_repository'], self.args['model_version'], 'settings.json')).read()",
    "file beside config.pbtxt": "open(os.path.join(self.args['model_repository'], 'labels.txt')).read().split()",
    "files of the version": "sorted(each for each in os.listdir(HERE) if not each.startswith('__'))",
    "helpers": "[shout('a'), deeper('b'), late_module.VALUE, NAMES]",
    "dataclass": "dataclasses.asdict(Settings(**json.loads((HERE / 'settings.json').read_text())))",
    "base class": "[each.__name__ for each in type(self).__mro__]",
    "mixed in": "Mixed().kind",
    "importlib": "importlib.import_module('helpers.words').shout('c')",
    "module again": "__import__('model') is not None",
    "own module's name in sys.modules": "__name__ in sys.modules",
    "class pickled": "__import__('pickle').loads(__import__('pickle').dumps(Settings(0.1))).threshold",
    "logger": "[logger.info('said'), logging.warning('warned'), warnings.warn('careful')]",
    "standard error": "print('to stderr', file=sys.stderr, flush=True)",
    "loop of initialize": "self.loop.run_until_complete(asyncio.sleep(0.001, 'slept'))",
    "asyncio.run": "asyncio.run(asyncio.sleep(0.001, 'slept'))",
    "new loop": "(lambda loop: [loop.run_until_complete(asyncio.sleep(0, 1)), loop.close()])(asyncio.new_event_loop())",
    "loop in a thread": "asyncio.run_coroutine_threadsafe(asyncio.sleep(0.001, 'threaded'), self.background).result(5)",
    "executor": "list(self.threads.map(len, ['a', 'bb']))",
    "processes": "list(self.processes.map(len, ['a', 'bb']))",
    "child": "subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout.strip()",
    "shell": "os.popen('echo said').read().strip()",
    "temporary file": "tempfile.NamedTemporaryFile().name.startswith(tempfile.gettempdir())",
    "temporary folder": "os.path.isdir(tempfile.mkdtemp())",
    "lru_cache": "functools.lru_cache(None)(lambda x: x + 1)(1)",
    "environment set": "os.environ.setdefault('MODEL_SETTING', 'set') and os.environ['MODEL_SETTING']",
    "socket pair": "(lambda pair: [pair[0].send(b'x'), pair[1].recv(1).decode()])(__import__('socket').socketpair())",
    "recursion": "(lambda f: f(f, 300))(lambda f, n: 0 if n == 0 else 1 + f(f, n - 1))",
    "random seeds": "[float(np.random.RandomState(1).rand()), __import__('random').Random(1).random()]",
    "time zone": "time.tzname[0]",
    "encoding": "[sys.getfilesystemencoding(), sys.getdefaultencoding(), 'ö'.encode().hex()]",
    "print of no ASCII": "print('Grüße 🚀')",
    "arguments' names": "sorted(self.args)",
    "arguments' types": "sorted({type(each).__name__ for each in self.args.values()})",
    "config's names": "sorted(json.loads(self.args['model_config']))",
    "input's config": "json.loads(self.args['model_config'])['input']",
    "output's config": "json.loads(self.args['model_config'])['output']",
    "parameters' config": "json.loads(self.args['model_config'])['parameters']",
    "groups' config": "json.loads(self.args['model_config'])['instance_group']",
    "keywords of a tensor": "pb_utils.Tensor(name='t', numpy_array=np.ones(1)).name()",
    "keywords of an error": "pb_utils.TritonError(message='m', code=pb_utils.TritonError.NOT_FOUND).message()",
    "keywords of a response": "len(pb_utils.InferenceResponse(output_tensors=[], error=None).output_tensors())",
    "response has no error": "[pb_utils.InferenceResponse(output_tensors=[]).has_error(), pb_utils.InferenceResponse(error=pb_utils.TritonError('x')).has_error()]",
    "error of a response": "pb_utils.InferenceResponse(error=pb_utils.TritonError('x')).error().message()",
    "outputs of an error": "[each.name() for each in pb_utils.InferenceResponse([pb_utils.Tensor('t', np.ones(1))], pb_utils.TritonError('x')).output_tensors()]",
    "tensor not there": "pb_utils.get_input_tensor_by_name(r, 'nothing') is None",
    "output not there": "pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([]), 'nothing') is None",
    "same tensor again": "[pb_utils.get_input_tensor_by_name(r, 'do').as_numpy().tolist() == pb_utils.get_input_tensor_by_name(r, 'do').as_numpy().tolist()]",
    "shape of a tensor": "[list(each.shape()) for each in r.inputs()]",
    "tensor of 0 dimensions": "list(pb_utils.Tensor('t', np.float32(1).reshape(())).shape())",
    "tensor in Fortran order": "pb_utils.Tensor('t', np.asfortranarray(np.arange(6).reshape(2, 3))).as_numpy().tolist()",
    "tensor of reversed rows": "pb_utils.Tensor('t', np.arange(6).reshape(2, 3)[::-1]).as_numpy().tolist()",
    "tensor that cannot be written": "(lambda a: [a.setflags(write=False), pb_utils.Tensor('t', a).as_numpy().tolist()])(np.ones(2))",
    "tensor of big endian": "pb_utils.Tensor('t', np.arange(2, dtype='>i4')).as_numpy().tolist()",
    "tensor of a subclass": "pb_utils.Tensor('t', np.ma.masked_array([1, 2], [0, 1])).as_numpy().tolist()",
    "tensor of matrix": "pb_utils.Tensor('t', np.matrix([[1, 2]])).as_numpy().tolist()",
    "tensor broadcast": "pb_utils.Tensor('t', np.broadcast_to(np.ones(1), (2, 2))).as_numpy().tolist()",
    "tensor of no elements": "list(pb_utils.Tensor('t', np.zeros((0, 3))).shape())",
    "from_dlpack": "np.from_dlpack(pb_utils.Tensor('t', np.arange(3))).tolist()",
    "BLS with memory": "ask('habits_echo', self.x, preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)).exec().output_tensors()[0].as_numpy().tolist()",
    "BLS with a trace": "ask('habits_echo', self.x, trace=r.trace()).exec().has_error()",
    "BLS with a timeout": "ask('habits_echo', self.x, timeout=1000000).exec().has_error()",
    "BLS with flags": "ask('habits_echo', self.x, flags=0).exec().has_error()",
    "BLS of a version": "ask('habits_echo', self.x, model_version=1).exec().has_error()",
    "BLS of the latest version": "ask('habits_echo', self.x, model_version=-1).exec().has_error()",
    "BLS twice": "(lambda q: [q.exec().has_error(), q.exec().has_error()])(ask('habits_echo', self.x))",
    "BLS response's id": "ask('habits_echo', self.x, request_id='q').exec().output_tensors()[0].name()",
    "BLS in a pool": "[each.has_error() for each in self.threads.map(lambda q: q.exec(), [ask('habits_echo', self.x) for _ in range(3)])]",
    "BLS in a loop": "asyncio.run(gathered([ask('habits_echo', self.x) for _ in range(3)]))",
    "BLS of a tensor given": "ask('habits_echo', pb_utils.Tensor('x', np.zeros((2,), np.float32))).exec().output_tensors()[0].as_numpy().tolist()",
    "BLS output as numpy": "type(pb_utils.get_output_tensor_by_name(ask('habits_echo', self.x).exec(), 'y').as_numpy()).__name__",
    "BLS output can be written": "bool(pb_utils.get_output_tensor_by_name(ask('habits_echo', self.x).exec(), 'y').as_numpy().flags.writeable)",
    "BLS error's type": "type(ask('no_such_model', self.x).exec().error()).__name__",
    "BLS of none": "ask('habits_echo', self.x, outputs=[]).exec().output_tensors()[0].name()",
    "threads that are there": "sorted({each.name.split('-')[0].split('_')[0] for each in threading.enumerate() if each is threading.main_thread()})",
    "garbage": "__import__('gc').collect() >= 0",
    "signal in the main thread": "str(__import__('signal').signal(__import__('signal').SIGUSR1, __import__('signal').SIG_IGN)) != ''",
    "multiprocessing's method": "__import__('multiprocessing').get_start_method()",
    "open files' limit": "__import__('resource').getrlimit(__import__('resource').RLIMIT_NOFILE)[0] >= 1024",
    "user": "os.path.expanduser('~') == os.environ.get('HOME')",
    "arguments of the process": "isinstance(sys.argv, list)",
    "stdin": "sys.stdin is None or sys.stdin.read(1) == ''",
}
BODY = f"""
    def prepare(self):
        self.loop = asyncio.get_event_loop_policy().new_event_loop()
        self.background = asyncio.new_event_loop()
        threading.Thread(target=self.background.run_forever, daemon=True).start()
        self.threads = concurrent.futures.ThreadPoolExecutor(2)
        self.processes = concurrent.futures.ProcessPoolExecutor(1)
        self.x = pb_utils.Tensor("x", np.ones(1, np.float32))

    def execute(self, requests):
        found = []
        for r in requests:
            what = pb_utils.get_input_tensor_by_name(r, "do").as_numpy().ravel()[0].decode()
            made = {lambdas(SNIPPETS)}
            try:
                value = json.dumps(made[what]())
            except Exception as error:
                value = type(error).__name__
            found.append(pb_utils.InferenceResponse([told(value)]))
        return found

    def finalize(self):
        self.background.call_soon_threadsafe(self.background.stop)
        self.processes.shutdown()
"""
GATHERED = """

async def gathered(calls):
    return [each.has_error() for each in await asyncio.gather(*(call.async_exec() for call in calls))]
"""
ECHO = """
    def execute(self, requests):
        return [answer(pb_utils.Tensor("y", r.inputs()[0].as_numpy())) for r in requests]
"""
RETURNED = {
    "list": "[pb_utils.InferenceResponse([told('a')]) for _ in requests]",
    "keywords": "[pb_utils.InferenceResponse(output_tensors=[told('a')], error=None) for _ in requests]",
    "more outputs": "[pb_utils.InferenceResponse([told('a'), pb_utils.Tensor('z', np.ones(1))]) for _ in requests]",
    "tuple of tensors": "[pb_utils.InferenceResponse((told('a'),)) for _ in requests]",
    "error and outputs": "[pb_utils.InferenceResponse([told('a')], pb_utils.TritonError('both')) for _ in requests]",
    "text as error": "[pb_utils.InferenceResponse(error='text') for _ in requests]",
    "exception as error": "[pb_utils.InferenceResponse(error=ValueError('v')) for _ in requests]",
    "map": "map(lambda r: pb_utils.InferenceResponse([told('a')]), requests)",
    "generator": "(pb_utils.InferenceResponse([told('a')]) for r in requests)",
    "numpy array": "np.array([pb_utils.InferenceResponse([told('a')]) for _ in requests], dtype=object)",
    "None in the list": "[None for _ in requests]",
    "nothing": "None",
    "dictionary": "{'y': 'a'}",
    "one response": "pb_utils.InferenceResponse([told('a')])",
    "too many": "[pb_utils.InferenceResponse([told('a')]) for _ in range(len(requests) + 1)]",
    "KeyboardInterrupt": "(_ for _ in ()).throw(KeyboardInterrupt('stop'))",
    "assertion": "exec('assert 1 == 2, \"not equal\"')",
    "error with lines": "(_ for _ in ()).throw(ValueError('first\\nsecond'))",
    "error without text": "(_ for _ in ()).throw(ValueError())",
    "error of its own": "(_ for _ in ()).throw(Own(3))",
    "model exception": "(_ for _ in ()).throw(pb_utils.TritonModelException('model says'))",
    "stop iteration": "next(iter([]))",
}
RETURNS = f"""
    def execute(self, requests):
        what = requests[0].inputs()[0].as_numpy().ravel()[0].decode()
        made = {lambdas(RETURNED)}
        return made[what]()
"""
RETURNS_HEAD = """import numpy as np
import triton_python_backend_utils as pb_utils


def told(value):
    return pb_utils.Tensor("y", np.array([value], dtype=object))


class Own(Exception):
    def __init__(self, number):
        super().__init__(f"own {number}")


"""
IN, OUT = "do:STRING:1", "y:STRING:1"
MODELS = (
    Model(
        "habits",
        BODY,
        config_of(IN, OUT, more='parameters { key: "threshold" value { string_value: "0.5" } }'),
        FILES,
        head=HEAD.replace("class Mixed", GATHERED.strip("\n") + "\n\n\nclass Mixed"),
        base="BaseModel",
    ),
    Model("habits_echo", ECHO, config_of("x:FP32:-1", "y:FP32:-1")),
    Model("habits_returns", RETURNS, config_of(IN, OUT), head=RETURNS_HEAD),
)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name in SNIPPETS:
        yield from by("habits", name, doing("habits", name), (GRPC,))
    for name in RETURNED:
        if name not in ("None in the list", "nothing"):
            yield from by("habits, returned", name, doing("habits_returns", name), (GRPC, JSON, STREAM))
    yield Case("habits: afterwards", [Infer(Request("habits_echo", [floats("x", 1)]), GRPC)])
