"""Coverage-guided fuzzing of what reads clients' bytes, for as long as you like.

    python -m benchmarks.fuzz --seconds 300            # every target, one after the other
    python -m benchmarks.fuzz --targets wire json --runs 100000

atheris (libFuzzer for Python) makes inputs that reach new branches of `server/`; `oracles.py` says what must be
true of each. An input that breaks it is written to the folder `--found`, and the exit status is 1. Such inputs are kept
as cases in tests/server/test_fuzz_cases.py.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from testing.report import Row, option_parser, start_report

TARGETS = ("wire", "json", "output", "inflate", "http")
INSTRUMENTED = ["gangway.server", "gangway.executor.frames"]
MAX_BYTES = 4096
SLOW_S = 10  # one input may take so long
MEMORY_MB = 2048
DICTIONARY = (
    b'"inputs"', b'"outputs"', b'"name"', b'"shape"', b'"datatype"', b'"data"', b'"parameters"', b'"id"',
    b'"binary_data_size"', b'"binary_data"', b'"binary_data_output"', b'"shared_memory_region"', b'"classification"',
    b'"INPUT0"', b'"INPUT1"', b'"OUTPUT0"', b'"text_input"', b'"INT32"', b'"FP32"', b'"BYTES"', b'"UINT64"', b'"BOOL"',
    b"NaN", b"-Infinity", b"1e999", b"18446744073709551616", b"-0", b"\\ud800", b"null", b"true", b"[[", b"]]",
    b'"key"', b'"offset"', b'"byte_size"', b'"raw_handle"', b'"b64"', b'"ready"', b'"trace_level"', b'"file:1/x"',
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How one target ended. `found` is the input that broke it, if one did."""

    target: str
    inputs: int
    branches: int
    seconds: float
    found: str
    said: str

    def row(self) -> Row:
        """Return it as a row of the table."""
        result = f"FOUND {self.found}: {self.said}" if self.said else "nothing found"
        return {
            "target": self.target,
            "inputs": self.inputs,
            "branches reached": self.branches,
            "seconds": self.seconds,
            "": result,
        }


def fuzz(target: str, flags: Sequence[str]) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""
    atheris: Any = import_module("atheris")  # a package that only fuzzing needs, without types

    with atheris.instrument_imports(include=INSTRUMENTED):
        from benchmarks.fuzz.oracles import ORACLES  # noqa: PLC0415 - has to be instrumented
    atheris.Setup([sys.argv[0], *flags], ORACLES[target])
    atheris.Fuzz()


def run(target: str, seconds: float, runs: int, seed: int, found: Path) -> Outcome:
    """Fuzz one target in a process of its own."""
    from benchmarks.fuzz.seeds import seeds_of  # noqa: PLC0415 - not in the process that is instrumented

    found.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        corpus, words = Path(name) / "corpus", Path(name) / "words"
        corpus.mkdir()
        for number, content in enumerate(seeds_of(target)):
            (corpus / f"seed-{number}").write_bytes(content)
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in DICTIONARY))
        flags = [f"-max_total_time={seconds:.0f}"] if seconds else []
        flags += [f"-runs={runs}"] if runs else []
        flags += [f"-seed={seed}", f"-max_len={MAX_BYTES}", f"-timeout={SLOW_S}", f"-rss_limit_mb={MEMORY_MB}"]
        flags += [f"-dict={words}", f"-artifact_prefix={found}/{target}-", "-print_final_stats=1", str(corpus)]
        command = [sys.executable, "-m", "benchmarks.fuzz", "--one", target, json.dumps(flags)]
        begin_s = time.monotonic()
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    return _outcome(target, done.stdout.decode(errors="replace"), done.returncode, time.monotonic() - begin_s)


def _escaped(word: bytes) -> str:
    """Return a word as libFuzzer's dictionaries have it."""
    return "".join(f"\\x{byte:02x}" for byte in word)


def _outcome(target: str, said: str, status: int, seconds: float) -> Outcome:
    inputs = re.findall(r"number_of_executed_units:\s*(\d+)", said) or re.findall(r"^#(\d+)", said, re.M)
    branches = re.findall(r"cov: (\d+)", said)
    artifact = re.search(r"Test unit written to (\S+)", said)
    complaint = re.search(r"^(\S*(?:Error|Exception)\b.*)$|^(SUMMARY: .*)$", said, re.M)
    problem = ((complaint[0] if complaint else said[-300:]) if status else "")[:300]
    return Outcome(
        target,
        int(inputs[-1]) if inputs else 0,
        int(branches[-1]) if branches else 0,
        seconds,
        Path(artifact[1]).name if artifact else "",
        problem,
    )


def main() -> int:
    """Fuzz; return 0 if nothing was found."""
    parser = option_parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="what to fuzz (all)")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="for each target (60 without --runs)")
    parser.add_argument("--runs", type=int, default=0, metavar="N", help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds and numbers of inputs do the same (1)")
    parser.add_argument("--found", type=Path, default=Path("build/fuzz"), metavar="DIR", help="where inputs go")
    parser.add_argument("--one", nargs=2, metavar=("TARGET", "FLAGS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        fuzz(options.one[0], json.loads(options.one[1]))
        return 0
    report = start_report("Coverage-guided fuzzing of what reads clients' bytes")
    seconds = options.seconds or (0.0 if options.runs else 60.0)
    outcomes = [run(target, seconds, options.runs, options.seed, options.found) for target in options.targets]
    report.table("fuzzing", [outcome.row() for outcome in outcomes])
    report.target("targets that broke", sum(bool(outcome.said) for outcome in outcomes), 0)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
