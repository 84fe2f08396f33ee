"""What models are drawn: a rule for each operator."""

from benchmarks.fuzz.differential.rules import (
    arithmetic,
    attention,
    contrib,
    control_flow,
    images,
    machine_learning,
    movements,
    products,
    quantised,
    reductions,
    sequences,
)
from benchmarks.fuzz.differential.rules.registry import RULES, Rule

__all__ = [
    "RULES",
    "Rule",
    "arithmetic",
    "attention",
    "contrib",
    "control_flow",
    "images",
    "machine_learning",
    "movements",
    "products",
    "quantised",
    "reductions",
    "sequences",
]
