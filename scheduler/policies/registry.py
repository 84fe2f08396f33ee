"""The scheduling policies by name, as `--scheduler` and `gangway simulate --policy` take them.

`gangway:without=PART+PART` is the default policy without some of its parts (`policy_config.PolicyConfig.parts`), as
`benchmarks/scheduling/ablation.py` compares them. It is for measurements only.
"""

from collections.abc import Callable, Sequence

from gangway.base.suggestion import did_you_mean
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.baselines import EarliestDeadlineFirst, Parties, Prema, make_triton
from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policies.layerweaver import AiMt, Layerweaver, LayerweaverPlus
from gangway.scheduler.policies.per_node import Nodes, PerNode
from gangway.scheduler.policies.precision_choice import PrecisionChooser
from gangway.scheduler.policies.veltair import (
    ModelFcfs,
    Planaria,
    Protean,
    Veltair,
    VeltairAc,
    VeltairAs,
    fixed_block,
    make_veltair,
)
from gangway.scheduler.policy_config import DEFAULT
from gangway.scheduler.stages.compound_policy import CompoundPolicy


def make_gangway(argument: str) -> Gangway:
    """Make the default policy, of "" or "without=PART+PART". Raises ValueError."""
    option, _, names = argument.partition("=")
    if argument and option != "without":
        raise ValueError(f"scheduler {DEFAULT_POLICY!r} takes without=PART+PART, got {argument!r}")
    return Gangway(DEFAULT.without(*names.split("+")) if argument else DEFAULT)


# Each makes a policy of the text behind a colon, as in "fixed_block:6" (empty without one). Raises ValueError.
DEFAULT_POLICY = "gangway"
POLICIES: dict[str, Callable[[str], Policy]] = {
    "fixed_block": fixed_block,
    "model_fcfs": lambda argument: plain(ModelFcfs, argument),
    DEFAULT_POLICY: make_gangway,
    "planaria": lambda argument: plain(Planaria, argument),
    "protean": lambda argument: plain(Protean, argument),
    "veltair": lambda argument: make_veltair(Veltair, argument),
    "veltair_ac": lambda argument: plain(VeltairAc, argument),
    "veltair_as": lambda argument: make_veltair(VeltairAs, argument),
    "edf": lambda argument: plain(EarliestDeadlineFirst, argument),
    "layerweaver": lambda argument: plain(Layerweaver, argument),
    "layerweaver_plus": lambda argument: plain(LayerweaverPlus, argument),
    "prema": lambda argument: plain(Prema, argument),
    "ai_mt": lambda argument: plain(AiMt, argument),
    "parties": lambda argument: plain(Parties, argument),
    "triton": make_triton,
}


def make_policy(text: str, nodes: Nodes = ()) -> Policy:
    """Return a fresh policy for NAME or NAME:ARGUMENT; ValueError names the known ones, or what is wrong.

    `nodes`: the cores of each NUMA node. With several no gang crosses nodes.
    """
    if len(nodes) > 1:
        return PerNode(lambda: make_policy(text), nodes)
    name, _, argument = text.partition(":")
    if name not in POLICIES:
        raise ValueError(
            f"unknown scheduler {name!r}; known: {', '.join(sorted(POLICIES))}{did_you_mean(name, POLICIES)}"
        )
    return POLICIES[name](argument)


def make_policies(text: str, schedulers: Sequence[Nodes]) -> list[Policy]:
    """Return a fresh policy for each of several schedulers. Raises ValueError as `make_policy` does."""
    return [make_policy(text, nodes) for nodes in schedulers]


def build_policy(policy: Policy) -> CompoundPolicy:
    """Return what a driver asks: the policy, the choice of precisions around it, and compound tasks around both."""
    return policy if isinstance(policy, CompoundPolicy) else CompoundPolicy(PrecisionChooser(policy))


def plain(policy: type[Policy], argument: str) -> Policy:
    """Make a policy that takes no argument."""
    made = policy()
    if argument:
        raise ValueError(f"scheduler {made.name!r} takes no argument, got {argument!r}")
    return made
