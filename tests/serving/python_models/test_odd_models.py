"""What models do to their own process: exceptions, streams that are closed or lead elsewhere, what ends with it."""

import time
from collections.abc import Iterator

import pytest
from tritonclient.utils import InferenceServerException

from testing.waiting import until
from tests.helpers.python_models import TEXTS, config_of, executes, write
from tests.helpers.served import Served, serving
from tests.helpers.whole_server import alive

NAMES = '"asyncio": asyncio, "contextlib": contextlib, "io": io, "os": os, "sys": sys, "Mute": Mute, "Told": Told'
HEAD = (
    "import asyncio\nimport contextlib\nimport io\nimport os\nimport sys\n\n"
    "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n"
    "class Mute(Exception):\n    def __str__(self):\n        return 1 / 0\n\n\n"
    "class Told:\n    def write(self, text):\n        pb_utils.Logger.log_info('told: ' + text.strip())\n\n"
    "    def flush(self):\n        pass\n\n\n"
)
CANCELLED = """
async def wait():
    waits = asyncio.ensure_future(asyncio.sleep(9))
    await asyncio.sleep(0)
    waits.cancel()
    await waits

asyncio.run(wait())
"""
CLOSES = {
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "none": "sys.stdout = sys.stderr = None",
    "descriptors": "os.close(1); os.close(2)",
    "logger": "sys.stdout = sys.stderr = Told()",
}

LEAVES = """
    def initialize(self, args):
        self.folder = tempfile.TemporaryDirectory(prefix="left-", dir=args["model_repository"])
        self.file = open(os.path.join(args["model_repository"], "written"), "w")
        self.file.write("buffered")
        self.manager = multiprocessing.Manager()
        self.executor = concurrent.futures.ProcessPoolExecutor(1)
        self.executor.submit(int).result()
        threading.Thread(target=time.sleep, args=(1000,)).start()
        atexit.register(print, "at the exit")
        if args["model_name"] == "fails":
            raise ValueError("not today")

    def __del__(self):
        print("deleted")

    def execute(self, requests):
        return []

    def finalize(self):
        print("finalized")
"""

FINALIZES = """
    def finalize(self):
        raise KeyError("no such thing")
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("models")
    for name in ("raises", *CLOSES):
        write(repository, name, executes(NAMES), config_of(*TEXTS), HEAD)
    write(repository, "finalizes", executes(NAMES) + FINALIZES, config_of(*TEXTS), HEAD)
    for name in ("leaves", "fails"):
        head = "import atexit, concurrent.futures, multiprocessing, os, tempfile, threading, time\n\n"
        write(repository, name, LEAVES, config_of(*TEXTS), head)
    flags = ["--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false", "--strict-readiness=false"]
    with serving(repository, *flags) as served:
        yield served


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (CANCELLED, "CancelledError: "),
        ("raise asyncio.CancelledError", "CancelledError: "),
        ("raise KeyboardInterrupt('stop')", "KeyboardInterrupt: stop"),
        ("raise GeneratorExit", "GeneratorExit: "),
        ("raise type('Own', (BaseException,), {})('own')", "Own: own"),
        ("raise Mute", "Mute: <exception str() failed>"),
        ("raise ValueError('a\\udcffb')", r"ValueError: a\udcffb"),
    ],
)
def test_any_exception_costs_its_request_alone(served: Served, code: str, said: str) -> None:
    before = served.instances("raises")
    with pytest.raises(InferenceServerException) as raised:
        served.executed("raises", code)
    assert raised.value.status() == "StatusCode.INTERNAL"
    assert raised.value.message().endswith(said)
    assert served.executed("raises", "found = 1") == "1"
    assert served.instances("raises") == before


@pytest.mark.parametrize("name", CLOSES)
def test_a_model_may_do_anything_with_its_streams(served: Served, name: str) -> None:
    """Its exceptions are answered, and what it logs is in the server's log."""
    before = served.instances(name)
    assert served.executed(name, CLOSES[name]) == "None"
    with pytest.raises(InferenceServerException, match=f"ValueError: of {name}"):
        served.executed(name, f"raise ValueError('of {name}')")
    assert served.executed(name, f"pb.Logger.log_warn('logged by {name}')") == "None"
    until(lambda: f"WARNING {name}, instance 0: logged by {name}" in served.log())
    assert f"{name}, instance 0: ValueError: of {name}" in served.log()
    assert served.instances(name) == before


def test_what_is_logged_is_no_output_of_the_model(served: Served) -> None:
    code = (
        "b = io.StringIO()\nwith contextlib.redirect_stderr(b):\n    pb.Logger.log_info('a line')\nfound = b.getvalue()"
    )
    assert served.executed("raises", code) == ""
    until(lambda: "INFO raises, instance 0: a line" in served.log())


def test_what_is_printed_to_a_logger_is_logged_once(served: Served) -> None:
    assert served.executed("logger", "sys.stdout = Told()\nsys.stdout.write('by a writer')") == "None"
    until(lambda: "INFO logger, instance 0: told: by a writer" in served.log())
    assert served.log().count("told: by a writer") == 1


def test_a_library_may_parse_the_command_line(served: Served) -> None:
    """Some do so when they are imported."""
    code = "import argparse, sys\nargparse.ArgumentParser().parse_args()\nfound = sys.argv"
    assert served.executed("raises", code) == "['']"


def test_an_instance_ends_as_python_does(served: Served) -> None:
    """Folders and files are given back, and what is registered for the end is called, whatever threads there are."""
    folder, begin = served.repository / "leaves", time.monotonic()
    assert list(folder.glob("left-*"))
    instances = served.instances("leaves")
    served.client.unload_model("leaves")
    until(lambda: "leaves, instance 0: at the exit" in served.log())
    until(lambda: not alive(instances))
    said = [line.rpartition(": ")[2] for line in served.log().splitlines() if " leaves, instance 0: " in line]
    assert said == ["finalized", "deleted", "at the exit"]
    assert not list(folder.glob("left-*"))
    assert (folder / "written").read_text() == "buffered"
    assert time.monotonic() - begin < 4


def test_an_instance_that_cannot_be_initialised_leaves_nothing(served: Served) -> None:
    for said in ("at the exit", "deleted"):
        until(lambda said=said: f"fails, instance 0: {said}" in served.log())
    assert not list((served.repository / "fails").glob("left-*"))


def test_an_error_of_finalize_is_told_as_that(served: Served) -> None:
    served.client.unload_model("finalizes")
    until(lambda: "ERROR finalizes, instance 0: finalize failed: KeyError: 'no such thing'" in served.log())
    assert "finalizes, instance 0 cannot" not in served.log()
