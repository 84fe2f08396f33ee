"""What a configuration says of a Python model beside its tensors: instances, limits, its environment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.executor.instance_addresses import MOST_INSTANCES
from gangway.protos.model_config_pb2 import ModelConfig, ModelInstanceGroup
from gangway.python_backend.memory import PARAMETER as MEMORY_PARAMETER
from gangway.server.errors import ConfigError, shortened
from gangway.server.models.config_table import CONCURRENCY_PARAMETER, MOST_CONCURRENCY, concurrency_of, parameter_of

CODE_FILENAME: Final = "model.py"
CODE_SUFFIX: Final = ".py"
ENVIRONMENT_PARAMETER: Final = "EXECUTION_ENV_PATH"
TIMEOUT_PARAMETER: Final = "gangway_python_timeout_s"
CPU, MODEL = "CPU", "MODEL"
MODEL_DIRECTORY: Final = "$$TRITON_MODEL_DIRECTORY"
DEFAULT_TIMEOUT_S: Final = 60.0
LONGEST_TIMEOUT_S: Final = 500.0  # less than what a run may take before the worker itself counts as hung


@dataclass(frozen=True)
class PythonSettings:
    """Of one model. `kinds`: what each instance is told to be. `timeout_s`: of an execution.

    `memory_mib`: of an instance's data; 0: not given. `concurrency`: how many executions of coroutines an instance has
    open at the same time. `environment`: a folder, an archive, or an interpreter, or empty.
    """

    kinds: tuple[str, ...]
    timeout_s: float
    memory_mib: int
    concurrency: int
    environment: str
    is_decoupled: bool

    @classmethod
    def of(cls, config: ModelConfig) -> "PythonSettings":
        """Read a configuration. Raises ConfigError."""
        instances = sum(max(1, group.count) for group in config.instance_group) or 1
        if instances > MOST_INSTANCES:
            raise ConfigError(
                f"instance_group: {instances} instances of a Python model, at most {MOST_INSTANCES} can be"
            )
        kinds = [_kind(group.kind) for group in config.instance_group for _ in range(max(1, group.count))]
        timeout_s = _number(config, TIMEOUT_PARAMETER, DEFAULT_TIMEOUT_S, LONGEST_TIMEOUT_S)
        memory_mib = _number(config, MEMORY_PARAMETER, 0, 1 << 40)
        concurrency = concurrency_of(config)
        if not concurrency:
            raise ConfigError(
                f"parameter {CONCURRENCY_PARAMETER}: expected a whole number from 1 to {MOST_CONCURRENCY},"
                f' got "{shortened(parameter_of(config, CONCURRENCY_PARAMETER))}"'
            )
        return cls(
            tuple(kinds) or (CPU,),
            timeout_s,
            int(memory_mib),
            concurrency,
            parameter_of(config, ENVIRONMENT_PARAMETER),
            config.model_transaction_policy.decoupled,
        )

    @property
    def most_executions(self) -> int:
        """How many executions all instances can have begun; 0: any number, since those of decoupled models go on."""
        return 0 if self.is_decoupled else len(self.kinds) * self.concurrency

    def environment_path(self, folder: Path) -> Path:
        """Return where the environment is; `folder`: the model's."""
        return folder / self.environment.replace(MODEL_DIRECTORY, str(folder))


def _kind(kind: int) -> str:
    """Return Triton's word for the kind of a group: where there is no GPU, all but KIND_MODEL are on the processor."""
    return MODEL if kind == ModelInstanceGroup.KIND_MODEL else CPU


def _number(config: ModelConfig, name: str, default: float, most: float) -> float:
    if name not in config.parameters:
        return default
    text = parameter_of(config, name)
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number <= most:
        raise ConfigError(f'parameter {name}: expected a number above 0, at most {most:g}, got "{shortened(text)}"')
    return number
