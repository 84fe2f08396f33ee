"""A model that can answer requests, as the supervisor knows it."""

from dataclasses import dataclass

from gangway.artifact.format import Engine
from gangway.server.front_end_messages import ModelReady
from gangway.server.isolated import Isolated
from gangway.server.repository import ModelVersion
from gangway.server.variants import Shaped


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """`isolated`: how fast it is when it is alone, if that is known. `shaped`: what is compiled for certain sizes."""

    entry: ModelVersion
    ready: ModelReady
    isolated: Isolated | None
    engine: Engine
    shaped: Shaped | None
