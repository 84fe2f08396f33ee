"""All models and cases."""

import re
from collections.abc import Sequence
from functools import cache

from benchmarks.differential.asked import Case
from benchmarks.differential.kinds import (
    arrays,
    batches,
    calls,
    completions,
    configured,
    departures,
    ends,
    ensembles,
    errors,
    habits,
    public,
    requests,
    services,
    settings,
    streams,
    transported,
    values,
)
from benchmarks.differential.models import Model

KINDS = (
    *(values, errors, settings, requests, calls, streams, ensembles, batches, services, configured, departures),
    *(transported, public, habits, arrays, ends, completions),
)


@cache
def all_models() -> Sequence[Model]:
    """Return the models of all kinds."""
    return [model for kind in KINDS for model in kind.MODELS]


@cache
def all_cases() -> Sequence[Case]:
    """Return the cases of all kinds, in the order in which they are sent. Raises ValueError if two have one name."""
    cases = [case for kind in KINDS for case in kind.cases()]
    names = [case.name for case in cases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several cases are called {twice}")
    return cases


def models_of(cases: Sequence[Case]) -> Sequence[Model]:
    """Return the models that some cases name, and those that these name."""
    known = {model.name: model for model in all_models()}
    words = {word for case in cases for word in re.findall(r"\w+", repr(case.steps))}
    needed: set[str] = set()
    while found := (words & known.keys()) - needed:
        needed |= found
        words = {word for name in found for word in _quoted(known[name].body + known[name].config)}
    return [model for model in all_models() if model.name in needed]


def _quoted(text: str) -> list[str]:
    return re.findall(r"""["'](\w+)["']""", text)
