"""The targets that this machine runs, for tests: its best one in `make test`, narrower vectors in `make test-long`."""

import pytest

from gangway.compiler.target import TARGETS, machine_features, supported

NAMES = [name for name, spec in TARGETS.items() if supported(spec, machine_features())]
WIDEST, NARROWEST = NAMES[0], NAMES[-1]
EVERY = [WIDEST, *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:])]
ENDS = [WIDEST, *([pytest.param(NARROWEST, marks=pytest.mark.long)] if len(NAMES) > 1 else [])]
BESIDE_TILES = [pytest.mark.long] * ("amx_tile" in machine_features())  # marks of vectors, where tiles are tested, too
