"""The commands of `gangway`: the module of each, its line in the help, and the signals that end what runs for ever.

None of the modules is imported to know them.
"""

import signal
from typing import Final, NamedTuple

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return those that end this process: not SIGHUP where it is ignored from the beginning, as by `nohup`."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in ENDING if not (is_kept and number is signal.SIGHUP))


class Command(NamedTuple):
    """A subcommand: the module whose `main(argv)` runs it, and its line in the help.

    `main` makes a `CommandParser` before it does anything else, and returns the exit status.
    """

    module: str
    summary: str


COMMANDS: Final = {
    "serve": Command("gangway.server.serve_command", "serve models over gRPC and HTTP"),
    "capacity": Command("gangway.simulator.capacity", "say how many cores a load takes, and what load cores carry"),
    "check": Command("gangway.server.check.command", "say what computes ONNX files, and which models move from Triton"),
    "compile": Command("gangway.compiler.command", "compile a model and show its layers"),
    "quantize": Command("gangway.compiler.quantize_command", "make an int8 model of a float32 one"),
    "profile": Command("gangway.measure.profile_command", "measure a model's layers on this machine"),
    "plan": Command("gangway.measure.plan_command", "show how batches of a measured model are split over cores"),
    "tune": Command("gangway.measure.tune_command", "find versions of a model's layers worth having on this machine"),
    "compose": Command("gangway.measure.compose_command", "find the fastest schedule of several models on one input"),
    "simulate": Command("gangway.simulator.command", "run scheduling policies on a modelled machine of N cores"),
    "report": Command("gangway.measure.report_command", "draw what was measured of a model"),
    "scale-check": Command(
        "gangway.measure.scale_check.command", "measure what this machine's cores do together, beside predictions"
    ),
    "zoo": Command("gangway.zoo.command", "write example models with random weights"),
    "perf": Command("gangway.clients.perf.command", "load a server with several models, and find the rate it carries"),
    "route": Command("gangway.cluster.route_command", "distribute the calls of clients over several servers"),
    "place": Command("gangway.cluster.place_command", "choose which models are loaded on which of several servers"),
    "top": Command("gangway.clients.top", "show what a running server does: cores, models, jobs"),
    "client": Command("gangway.clients.command", "send one inference and show the answer and its times"),
    "completion": Command("gangway.server.completion_command", "print what makes a shell complete commands and flags"),
}
