"""Stages of a compound task: pointers cut each model's layers, and each stage shares the cores out. Pure.

The representation of "Automated Runtime-Aware Scheduling for Multi-Tenant DNN Inference on GPU" (Yu et al., ICCAD
2021): a model is a stream of layers, a pointer a barrier in it. On a GPU the layers of a stage share its processors by
themselves; here each gets cores, so that the stage ends as early as it can.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gangway.scheduler.prediction import fastest_versions
from gangway.scheduler.profiles import ModelProfile

Pointers = tuple[tuple[int, ...], ...]  # by model: the layer before which each barrier stands, ascending


@dataclass(frozen=True, slots=True)
class StreamSegment:
    """Layers [begin, end) of a stream, on so many cores. `versions`: of these layers; (): the first ones."""

    stream: int
    begin: int
    end: int
    cores: int
    versions: tuple[int, ...] = ()


Stage = tuple[StreamSegment, ...]  # runs side by side, and ends when all segments have ended
Schedule = tuple[Stage, ...]


def schedule(streams: Sequence[ModelProfile], pointers: Pointers, cores: int) -> Schedule:
    """Cut the streams at their pointers, and share the cores out in each stage so that its longest segment is shortest.

    A stage with more segments than cores becomes several, one after the other. Raises ValueError for pointers that do
    not ascend from 0 to the number of layers, or are not as many for each stream.
    """
    check_pointers(pointers, [stream.layers for stream in streams])
    barriers = len(pointers[0]) if pointers else 0
    stages: list[Stage] = []
    for number in range(barriers + 1):
        spans = []
        for index, (stream, row) in enumerate(zip(streams, pointers, strict=True)):
            begin = row[number - 1] if number else 0
            end = row[number] if number < barriers else stream.layers
            if begin < end:
                spans.append((index, begin, end))
        for first in range(0, len(spans), cores):
            stages.append(_share_out(streams, spans[first : first + cores], cores))
    return tuple(stages)


def check_pointers(pointers: Pointers, layers: Sequence[int]) -> None:
    """Raise ValueError for pointers that do not cut streams of so many layers."""
    if len(pointers) != len(layers):
        raise ValueError(f"{len(pointers)} rows of pointers for {len(layers)} models")
    if len({len(row) for row in pointers}) > 1:
        raise ValueError("each model needs the same number of pointers")
    for row, end in zip(pointers, layers, strict=True):
        if list(row) != sorted(row) or (row and not 0 <= row[0] <= row[-1] <= end):
            raise ValueError(f"pointers {row} do not ascend from 0 to {end}")


def check_schedule(stages: Schedule, layers: Sequence[int], cores: int) -> None:
    """Raise ValueError unless the stages run each layer of streams of so many layers once, in order, on these cores."""
    reached = [0] * len(layers)
    for number, stage in enumerate(stages):
        own = [segment.cores for segment in stage]
        streams = {segment.stream for segment in stage}
        if not stage or len(streams) < len(stage) or min(own) < 1 or sum(own) > cores:
            raise ValueError(f"stage {number} does not fit {cores} cores")
        for segment in stage:
            if not 0 <= segment.stream < len(layers):
                raise ValueError(f"stage {number} is of stream {segment.stream} of {len(layers)}")
            if not reached[segment.stream] == segment.begin < segment.end:
                raise ValueError(f"layers {segment.begin} to {segment.end} do not follow {reached[segment.stream]}")
            if len(segment.versions) not in (0, segment.end - segment.begin):
                raise ValueError(f"stage {number} has {len(segment.versions)} versions in a segment")
            reached[segment.stream] = segment.end
    if reached != list(layers):
        raise ValueError(f"the stages end at layers {reached} of {list(layers)}")


def sequential(streams: Sequence[ModelProfile]) -> Pointers:
    """Return pointers for one model after the other, each on all cores."""
    ends = [stream.layers for stream in streams]
    return tuple(
        tuple(end if barrier >= index else 0 for barrier in range(len(ends) - 1)) for index, end in enumerate(ends)
    )


def parallel(streams: Sequence[ModelProfile], barriers: int = 0) -> Pointers:
    """Return pointers for a single stage; `barriers` of them stand at the models' ends."""
    return tuple((stream.layers,) * barriers for stream in streams)


def stage_us(streams: Sequence[ModelProfile], stage: Stage) -> float:
    """Return how long a stage takes by the profiles, in microseconds: as long as its longest segment."""
    return max(segment_us(streams[segment.stream], segment) for segment in stage)


def segment_us(stream: ModelProfile, segment: StreamSegment) -> float:
    """Return how long a segment takes by its model's profile, in microseconds: one row, the fastest versions."""
    before_us = _before_us(stream, segment.cores)
    return before_us[segment.end] - before_us[segment.begin]


def _before_us(stream: ModelProfile, cores: int) -> Sequence[float]:
    """Return the times of the layers before each layer, L + 1 numbers. Remembered, since searches ask often."""
    key = (_before_us, cores)
    known: Sequence[float] | None = stream.derived.get(key)
    if known is None:
        versions = fastest_versions(stream, 0.0, cores) or (0,) * stream.layers
        times_us = [stream.layer_us(layer, cores, version) for layer, version in enumerate(versions)]
        known = stream.derived[key] = tuple(accumulate(times_us, initial=0.0))
    return known


def schedule_us(streams: Sequence[ModelProfile], stages: Schedule) -> float:
    """Return the time from the first stage's begin to the last one's end by the profiles, in microseconds."""
    return sum(stage_us(streams, stage) for stage in stages)


def _share_out(streams: Sequence[ModelProfile], spans: Sequence[tuple[int, int, int]], cores: int) -> Stage:
    """Give each span a core at least, so that the longest takes least.

    The longest gets the fewest cores on which it is faster, until there are not as many: nothing else helps.
    """
    segments = [StreamSegment(stream, begin, end, 1) for stream, begin, end in spans]
    times_us = [segment_us(streams[segment.stream], segment) for segment in segments]
    free = cores - len(segments)
    while True:
        longest = max(range(len(segments)), key=times_us.__getitem__)
        segment = segments[longest]
        for more in range(1, free + 1):
            grown = replace(segment, cores=segment.cores + more)
            time_us = segment_us(streams[segment.stream], grown)
            if time_us < times_us[longest]:
                segments[longest], times_us[longest] = grown, time_us
                free -= more
                break
        else:
            return tuple([_with_versions(streams[segment.stream], segment) for segment in segments])


def _with_versions(stream: ModelProfile, segment: StreamSegment) -> StreamSegment:
    versions = fastest_versions(stream, 0.0, segment.cores)[segment.begin : segment.end]
    return replace(segment, versions=versions) if any(versions) else segment
