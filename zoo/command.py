"""`gangway zoo`: write example models into a model repository."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gangway.zoo.repository import MODELS, NAMES, write_model


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 when the directory cannot be written. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"the zoo has no model '{unknown[0]}'; it has {', '.join(NAMES)}")
    for name in options.names or NAMES:
        folder = options.directory / name
        if not options.force and (folder / "1" / "model.onnx").exists():
            print(f"{name}: kept {folder} (--force writes it anew)")
            continue
        start = time.monotonic()
        try:
            write_model(options.directory, name, paper_qos=options.paper_qos)
        except OSError as error:
            print(f"gangway zoo: cannot write {folder}: {error.strerror or error}", file=sys.stderr)
            return 1
        print(f"{name}: wrote {folder} in {time.monotonic() - start:.1f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    models = "\n".join(f"  {name:<12} {entry.summary}" for name, entry in MODELS.items())
    parser = argparse.ArgumentParser(
        prog="gangway zoo",
        description="Write example models into a model repository: true architectures with random weights (always the "
        "same ones), as DIR/NAME/1/model.onnx and DIR/NAME/config.pbtxt.",
        epilog=f"models:\n{models}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the model repository; made if absent")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which models (default: all)")
    parser.add_argument(
        "--paper-qos",
        action="store_true",
        help="write the latency targets of the VELTAIR paper (meant for 64 cores) instead of 3x the isolated latency",
    )
    parser.add_argument("--force", action="store_true", help="write models anew that exist already")
    return parser
