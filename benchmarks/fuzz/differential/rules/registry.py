"""The table of rules, by domain and operator."""

from collections.abc import Callable

from benchmarks.fuzz.differential.draft import DOMAINS, Draft

Rule = Callable[[Draft], None]
RULES: dict[tuple[str, str], Rule] = {}


def rule(*operators: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the decorated function, which finishes drafts of these operators. `domain`: "", "ml" or "ms"."""

    def register(function: Rule) -> Rule:
        RULES.update({(DOMAINS[domain], operator): function for operator in operators})
        return function

    return register
