"""The scheduling policies by name, as `--scheduler` and `gangway simulate --policy` take them.

`gangway:without=PART+PART` is the default policy without some of its parts (`policy_config.PolicyConfig.parts`), as
`benchmarks/scheduling/ablation.py` compares them. It is for measurements only.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from gangway.base.suggestion import did_you_mean

if TYPE_CHECKING:
    from gangway.scheduler.policies.base import Policy
    from gangway.scheduler.policies.gangway import Gangway
    from gangway.scheduler.policies.per_node import Nodes
    from gangway.scheduler.stages.compound_policy import CompoundPolicy

# Module and name of what makes a policy of the text behind a colon, as in "fixed_block:6" (empty without one), or of
# the class of one that takes none. Only what is made is imported: the command line needs just the names.
DEFAULT_POLICY = "gangway"
POLICIES: dict[str, tuple[str, str]] = {
    "fixed_block": ("veltair", "fixed_block"),
    "model_fcfs": ("veltair", "ModelFcfs"),
    DEFAULT_POLICY: ("registry", "make_gangway"),
    "planaria": ("veltair", "Planaria"),
    "protean": ("veltair", "Protean"),
    "veltair": ("veltair", "make_veltair"),
    "veltair_ac": ("veltair", "VeltairAc"),
    "veltair_as": ("veltair", "make_veltair_as"),
    "edf": ("baselines", "EarliestDeadlineFirst"),
    "layerweaver": ("layerweaver", "Layerweaver"),
    "layerweaver_plus": ("layerweaver", "LayerweaverPlus"),
    "prema": ("baselines", "Prema"),
    "ai_mt": ("layerweaver", "AiMt"),
    "parties": ("baselines", "Parties"),
    "triton": ("baselines", "make_triton"),
}


def make_gangway(argument: str) -> "Gangway":
    """Make the default policy, of "" or "without=PART+PART". Raises ValueError."""
    from gangway.scheduler.policies.gangway import Gangway  # noqa: PLC0415 - see POLICIES
    from gangway.scheduler.policy_config import DEFAULT  # noqa: PLC0415

    option, _, names = argument.partition("=")
    if argument and option != "without":
        raise ValueError(f"scheduler {DEFAULT_POLICY!r} takes without=PART+PART, got {argument!r}")
    return Gangway(DEFAULT.without(*names.split("+")) if argument else DEFAULT)


def make_policy(text: str, nodes: "Nodes" = ()) -> "Policy":
    """Return a fresh policy for NAME or NAME:ARGUMENT; ValueError names the known ones, or what is wrong.

    `nodes`: the cores of each NUMA node. With several no gang crosses nodes.
    """
    if len(nodes) > 1:
        from gangway.scheduler.policies.per_node import PerNode  # noqa: PLC0415 - as above

        return PerNode(lambda: make_policy(text), nodes)
    name, _, argument = text.partition(":")
    if name not in POLICIES:
        raise ValueError(
            f"unknown scheduler {name!r}; known: {', '.join(sorted(POLICIES))}{did_you_mean(name, POLICIES)}"
        )
    module, maker = POLICIES[name]
    make = getattr(import_module(f"gangway.scheduler.policies.{module}"), maker)
    if not isinstance(make, type):
        made: Policy = make(argument)
    elif argument:
        raise ValueError(f"scheduler {name!r} takes no argument, got {argument!r}")
    else:
        made = make()
    return made


def make_policies(text: str, schedulers: "Sequence[Nodes]") -> "list[Policy]":
    """Return a fresh policy for each of several schedulers. Raises ValueError as `make_policy` does."""
    return [make_policy(text, nodes) for nodes in schedulers]


def build_policy(policy: "Policy") -> "CompoundPolicy":
    """Return what a driver asks: the policy, the choice of precisions around it, and compound tasks around both."""
    from gangway.scheduler.policies.precision_choice import PrecisionChooser  # noqa: PLC0415 - see POLICIES
    from gangway.scheduler.stages.compound_policy import CompoundPolicy  # noqa: PLC0415

    return policy if isinstance(policy, CompoundPolicy) else CompoundPolicy(PrecisionChooser(policy))
