"""`sequence_batching` of the zoo's models, as text for config.pbtxt."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceConfig:
    """`hidden`: inputs and outputs that clients do not see. `text`: the message's fields."""

    hidden: tuple[str, ...]
    text: str


def _control(name: str, kind: str, values: str = "int32_false_true: [ 0, 1 ]") -> str:
    return f'  control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}\n'


_START, _END, _READY = (_control(name, name) for name in ("START", "END", "READY"))
_IDLE = "  max_sequence_idle_microseconds: 10000000\n"
_DIRECT = f"  direct {{ }}\n{_IDLE}"
_OLDEST = f"  oldest {{ max_candidate_sequences: 1024 }}\n{_IDLE}"
_SUM = (
    '  state {\n    input_name: "SUM_IN"\n    output_name: "SUM_OUT"\n    data_type: TYPE_INT32\n    dims: [ 1 ]\n  }\n'
)

SEQUENCE_CONFIGS = {
    "simple_sequence": SequenceConfig(("START", "READY"), f"{_DIRECT}{_START}{_READY}"),
    "simple_dyna_sequence": SequenceConfig(
        ("START", "END", "READY", "CORRID"),
        f"{_OLDEST}{_START}{_END}{_READY}{_control('CORRID', 'CORRID', 'data_type: TYPE_UINT64')}",
    ),
    "simple_string_dyna_sequence": SequenceConfig(
        ("END", "CORRID", "SUM_IN", "SUM_OUT"),
        f"{_OLDEST}{_END}{_control('CORRID', 'CORRID', 'data_type: TYPE_STRING')}{_SUM}",
    ),
    "accumulator": SequenceConfig(("SUM_IN", "SUM_OUT"), f"{_DIRECT}{_SUM}"),
}
