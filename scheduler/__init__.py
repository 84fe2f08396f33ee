"""The decisions: pure policies, and the live process that applies them."""

from gangway.scheduler.compiled import use

WHY_INTERPRETED = use()  # no reason: its modules are compiled
