"""Which models are drawn: each operator in each operator set that changed it. A case's name draws it again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from zlib import crc32

import numpy as np
from onnx import defs

from benchmarks.fuzz.differential.draft import NEWEST_OPSET, OLDEST_OPSET, Draft, LeftOutError
from benchmarks.fuzz.differential.rules import RULES

_MOST_ROWS = 3
_TRIES = 20


@dataclass(frozen=True)
class Case:
    """A model of one node; `number` counts the draws of this operator in this operator set."""

    seed: int
    domain: str
    operator: str
    opset: int
    number: int

    @property
    def title(self) -> str:
        """Operator and operator set."""
        return f"{self.domain}{'.' if self.domain else ''}{self.operator}-{self.opset}"

    @property
    def name(self) -> str:
        """What draws it again: 1:Clip-13:4."""
        return f"{self.seed}:{self.title}:{self.number}"

    @classmethod
    def named(cls, name: str) -> "Case":
        """Return the case of such a name. Raises ValueError."""
        seed, title, number = name.split(":")
        path, _, opset = title.rpartition("-")
        domain, _, operator = path.rpartition(".")
        if (domain, operator) not in RULES:
            raise ValueError(f"{path} has no rule")
        return cls(int(seed), domain, operator, int(opset), int(number))


def cases_of(seed: int, matching: str = "") -> Iterator[Case]:
    """Yield cases without end: all operators in turn, each in one of its versions; `matching`: only these operators."""
    for turn in count():
        for domain, operator in chosen(matching):
            versions = versions_of(domain, operator)
            yield Case(seed, domain, operator, versions[turn % len(versions)], turn // len(versions))


@cache
def chosen(matching: str) -> Sequence[tuple[str, str]]:
    """Return the (domain, operator) that have a rule and a name like this, all if it is empty."""
    return [key for key in sorted(RULES) if versions_of(*key) and (not matching or key[1] in matching.split(","))]


@cache
def versions_of(domain: str, operator: str) -> Sequence[int]:
    """Return the operator sets that changed the operator, as far as both sides compute them."""
    if domain == "com.microsoft":
        return [1]
    history = sorted(
        schema.since_version
        for schema in defs.get_all_schemas_with_history()
        if (schema.domain, schema.name) == (domain, operator) and not schema.deprecated
    )
    if domain:
        return [version for version in history if version <= 3][-2:]
    gone = min(
        (
            schema.since_version
            for schema in defs.get_all_schemas_with_history()
            if (schema.domain, schema.name, schema.deprecated) == ("", operator, True)
        ),
        default=NEWEST_OPSET + 1,
    )
    old = [version for version in history if version < OLDEST_OPSET][-1:]
    known = [max(version, OLDEST_OPSET) for version in (*old, *history) if version in old or version >= OLDEST_OPSET]
    return sorted({version for version in known if version <= NEWEST_OPSET and version < gone})


def draw(case: Case) -> Draft:
    """Return the model of a case. Raises LeftOutError if there is none, of many tries."""
    random = np.random.default_rng([case.seed, case.number, crc32(case.title.encode())])
    for _ in range(_TRIES):
        draft = Draft(case.operator, case.domain, case.opset, random)
        try:
            RULES[case.domain, case.operator](draft)
        except LeftOutError:
            continue
        rows = {value.shape[0] if value.ndim else 0 for value in draft.inputs.values()}
        if len(rows) == 1 and 0 < min(rows) <= _MOST_ROWS and draft.chance(0.3):
            draft.batch = min(rows)
        return draft
    raise LeftOutError("no draw is possible")
