"""Every warning and error of the log is explained in docs/how-to/troubleshooting.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
ROOMS = ("server", "scheduler", "executor")
LEVELS = ("warning", "error", "exception", "critical")
LOGGED = re.compile(r"_log\.|logging\.|write_log_line")
FAULT = "a fault of the server"  # explained once for all lines that say it
VALUE = re.compile(r"%[-+.\d]*[sdgf]")


def said_in(path: Path) -> Iterator[str]:
    """Yield the text of each such line, "..." in place of values."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)) if LOGGED.search(source) else ():
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = ast.unparse(node.func)
        is_logged = called.rpartition(".")[2] in LEVELS and called.startswith(("_log.", "logging."))
        if is_logged or called == "write_log_line":
            yield "".join(_parts(node.args[0]))


def _parts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(str(text)):
            yield VALUE.sub("...", text).replace("%%", "%").replace("`", "")
        case ast.JoinedStr(values):
            for value in values:
                yield from _parts(value)
        case _:
            yield "..."


def test_each_line_is_explained() -> None:
    said = {text for room in ROOMS for path in (ROOT / room).rglob("*.py") for text in said_in(path)}
    assert len(said) > 60
    page, missing = PAGE.read_text(), []
    for text in sorted(said):
        parts = [part.strip(" :,;(.") for part in text.split("...")]
        words = [part for part in parts if " " in part] or parts  # one word, such as "model", stands before a value
        if FAULT not in text and not re.search(r".*?".join(map(re.escape, words)), page):
            missing.append(text)
    assert not missing
