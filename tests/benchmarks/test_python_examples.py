"""What is said of a client of an example. To run them all: `python -m benchmarks.python_models.examples`."""

import sys
from pathlib import Path

from benchmarks.python_models.examples import Client, Workplace


def test_the_end_of_a_client_decides(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "some"
    folder.mkdir(parents=True)
    (folder / "labels.txt").write_text("PASS")
    (folder / "good.py").write_text("import sys; print(open('labels.txt').read()); sys.exit(sys.argv[1] != 'word')")
    (folder / "bad.py").write_text("import sys; sys.exit('wrong sum')")
    clients = [
        Client("some/good.py", ("word",), ("numpy",), "ONNX for TensorRT"),
        Client("some/bad.py"),
        Client("some/good.py", ("word",), ("numpy", "no_such_package")),
    ]
    workplace = Workplace(tmp_path, tmp_path / "examples", sys.executable, clients)
    rows = [tuple(workplace.call(client).values()) for client in clients]
    assert rows == [
        ("some/good.py", "passed", "ONNX for TensorRT"),
        ("some/bad.py", "FAILED", "wrong sum"),
        ("some/good.py", "not run", "not installed: no_such_package"),
    ]
