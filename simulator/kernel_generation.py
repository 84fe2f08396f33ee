"""Whether the shipped models were measured with today's kernels.

A kernel's time follows from the templates that make its code, and from the rules that join operators to layers. Other
parts of the compiler may change without any time changing, and so may the templates. So a number decides: the
generation. It stands, with a digest of those sources, in `measured_models/kernels.json`, and in each measured model.

A test compares the digest. Whoever changes the sources says whether times change:

    python -m gangway.simulator.kernel_generation --same    # no kernel is faster or slower: the digest follows
    python -m gangway.simulator.kernel_generation --next    # times change: the models are to be measured anew
"""

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gangway.base.files import write_whole

FOLDER = Path(__file__).parent / "measured_models"
GENERATION_FILE = FOLDER / "kernels.json"
COMPILER = Path(__file__).parent.parent / "compiler"
# What makes a kernel's code, and what decides which operators are one layer, in which layout and how many tasks.
SOURCES = ("kernels/templates/*.py", "kernels/codegen.py", "place/fusion.py", "place/layout.py")


class GenerationError(Exception):
    """The recorded digest is not that of the sources, or nothing is recorded."""


@dataclass(frozen=True)
class KernelGeneration:
    """`number` rises when kernels take other times. `sources`: the digest when that was looked at last."""

    number: int
    sources: str


def recorded_generation(path: Path = GENERATION_FILE) -> KernelGeneration:
    """Return what is recorded. Raises GenerationError."""
    try:
        return KernelGeneration(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise GenerationError(f"{path}: {error}") from error


def current_generation(path: Path = GENERATION_FILE, compiler: Path = COMPILER) -> KernelGeneration:
    """Return what is recorded, if the sources are as they were then. Raises GenerationError, which says what to do."""
    recorded = recorded_generation(path)
    if recorded.sources != sources_digest(compiler):
        raise GenerationError(
            f"the sources of kernels are not those of generation {recorded.number}: if no kernel's time changes, run "
            "python -m gangway.simulator.kernel_generation --same, else --next, and measure the models anew "
            "(docs/explanation/simulator.md)"
        )
    return recorded


def sources_digest(compiler: Path = COMPILER) -> str:
    """Return 16 hex digits of the sources' meaning: comments, docstrings and line breaks do not count."""
    import hashlib  # noqa: PLC0415 - only who measures or tests needs it

    total = hashlib.sha256()
    for path in sorted(found for pattern in SOURCES for found in compiler.glob(pattern)):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = [each for each in body if not _is_text(each)]
        total.update(f"{path.name}\n{ast.dump(tree)}\n".encode())
    return total.hexdigest()[:16]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 when nothing is recorded yet."""
    parser = argparse.ArgumentParser(prog="python -m gangway.simulator.kernel_generation", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--same", action="store_true", help="kernels take the times they took")
    choice.add_argument("--next", action="store_true", help="some take other times")
    options = parser.parse_args(argv)
    try:
        number = recorded_generation(GENERATION_FILE).number + options.next
    except GenerationError as error:
        print(f"kernel_generation: {error}", file=sys.stderr)
        return 1
    write_whole(GENERATION_FILE, (json.dumps(asdict(KernelGeneration(number, sources_digest()))) + "\n").encode())
    print(f"{GENERATION_FILE}: generation {number}")
    return 0


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    sys.exit(main())
