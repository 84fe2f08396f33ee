"""`gangway zoo`: write example models into a model repository."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from gangway.base.command_line import CommandParser
from gangway.zoo.catalog import DEFAULT_NAMES, ENSEMBLES, MODELS, TRITON_EXAMPLES, build
from gangway.zoo.cost import count
from gangway.zoo.graph import ModelGraph
from gangway.zoo.repository import write_ensemble, write_graph

ALL, EXAMPLES = "all", "examples"  # groups of models


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 when the directory cannot be written. Wrong arguments exit with 2 (argparse).

    Without a directory it lists the models.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.directory is None:
        parser.print_help()
        return 0
    groups = _groups()
    if unknown := [name for name in options.names if name not in {*MODELS, *ENSEMBLES, *groups}]:
        parser.error(f"the zoo has no model '{unknown[0]}'; it has {', '.join((*MODELS, *ENSEMBLES))}")
    ensembles = [name for name in dict.fromkeys(options.names) if name in ENSEMBLES]
    named = [member for name in options.names for member in groups.get(name, (name,))]
    names = tuple(dict.fromkeys(named)) or DEFAULT_NAMES
    if options.sequence is not None and not any(MODELS[name].sequence for name in names):
        parser.error("none of these models takes tokens, so --sequence means nothing to them")
    try:
        graphs = [build(name, options.sequence if MODELS[name].sequence else None) for name in names]
    except ValueError as error:
        parser.error(str(error))
    name = ""
    try:
        for graph in graphs:
            name = graph.name
            _write(graph, options)
        for name in ensembles:
            _write_ensemble(name, options)
    except OSError as error:
        print(f"gangway zoo: cannot write {options.directory / name}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _groups() -> Mapping[str, tuple[str, ...]]:
    """Return what some names stand for: ensembles for their models, which are written before them."""
    models = {name: ensemble.models for name, ensemble in ENSEMBLES.items()}
    examples = tuple(name for name in MODELS if name in TRITON_EXAMPLES)
    return models | {ALL: tuple(MODELS), EXAMPLES: examples}


def _write(graph: ModelGraph, options: argparse.Namespace) -> None:
    name = graph.name
    folder = options.directory / name
    if not options.force and (folder / "1" / "model.onnx").exists():
        print(f"{name}: kept {folder} (--force writes it anew)")
        return
    start = time.monotonic()
    counts = count(graph.without_weights())
    write_graph(options.directory, graph, paper_qos=options.paper_qos)
    print(
        f"{name}: wrote {folder} in {time.monotonic() - start:.1f} s"
        f" ({counts.parameters / 1e6:.2f} M parameters, {counts.gflop:.2f} GFLOP)",
        flush=True,
    )


def _write_ensemble(name: str, options: argparse.Namespace) -> None:
    folder = options.directory / name
    if not options.force and (folder / "config.pbtxt").exists():
        print(f"{name}: kept {folder} (--force writes it anew)")
        return
    write_ensemble(options.directory, name)
    print(f"{name}: wrote {folder}, an ensemble of {', '.join(ENSEMBLES[name].models)}", flush=True)


def _parser() -> argparse.ArgumentParser:
    models = "\n".join(
        f"  {'*' if name in DEFAULT_NAMES else ' '} {name:<16}  {entry.summary}"
        + (f", {entry.sequence} tokens" if entry.sequence else "")
        for name, entry in MODELS.items()
    )
    models += "".join(f"\n    {name:<16}  {ensemble.summary}" for name, ensemble in ENSEMBLES.items())
    parser = CommandParser(
        prog="gangway zoo",
        description="Write example models into a model repository: true architectures with random weights (always the "
        "same ones), as DIR/NAME/1/model.onnx and DIR/NAME/config.pbtxt.",
        epilog=f"models (* those written when none is named; all of them are 4.3 GB):\n{models}",
    )
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="the model repository; made if absent")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"which models, '{ALL}', or '{EXAMPLES}' for those of Triton's client examples"
        f" (default: {', '.join(DEFAULT_NAMES)})",
    )
    parser.add_argument(
        "--sequence",
        type=int,
        metavar="N",
        help="tokens that the transformers take (default: 64 for gpt2, 128 for the others)",
    )
    parser.add_argument(
        "--paper-qos",
        action="store_true",
        help="write the latency targets of the papers VELTAIR (meant for 64 cores) and Layerweaver+ instead of 3x the "
        "isolated latency, where they name one",
    )
    parser.add_argument("--force", action="store_true", help="write models anew that exist already")
    return parser
