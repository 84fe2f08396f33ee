"""The models that the scheduler knows, from LoadModel to ModelUnloaded, and their profiles."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeAlias

from msgspec import structs

from gangway.artifact.profile import Profile
from gangway.executor.messages import LoadArtifact
from gangway.executor.slots import GOES_ON, SlotStatus
from gangway.scheduler.batching.former import BatchFormer
from gangway.scheduler.messages import LoadModel, SetProfile
from gangway.scheduler.policy import Query
from gangway.scheduler.profiles import (
    ModelProfile,
    estimated_profile,
    is_misjudged,
    scaled_profile,
    seen_profile,
    served_profile,
)

MISJUDGED_RUNS = 3  # in succession: a single one may have lost its core for a while

# Limits: queries that have to wait although cores are free, because a model may not have more of them under way.
#
# A limit is a resource with a name, of which a query holds some from its first layer to its last, also while it is
# stopped. The instances of a model are a resource of its own, and those of Triton's rate limiter are shared by models.

KEPT_US = 50_000.0  # a front end that does not tell of a query in that time will not

Urgency: TypeAlias = tuple[int, float, float, int]


class RateLimiter:
    """What models need, and who had how many turns. A server without limits pays nothing for it."""

    def __init__(self) -> None:
        self._models: dict[int, LoadModel] = {}
        self._available: dict[str, int] = {}
        self._most: dict[str, int] = {}  # that a query holds
        self._sharers: Counter[str] = Counter()  # models that hold some
        self._binding: dict[int, frozenset[int]] = {}  # models that may have to wait, by how many can be under way
        self._turns: Counter[int] = Counter()
        self._held: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by model and front end
        self._kept: defaultdict[int, list[float]] = defaultdict(list)  # of which no front end has told, until when
        self._refused: dict[int, Urgency] = {}  # by model: the most urgent that could not begin, as last asked

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._models)

    def add(self, spec: LoadModel) -> None:
        """Note what queries of a model need. It has had as many turns as those that had least, not none."""
        if spec.limits:
            fewest = min((self._share(model_id) for model_id in self._models if self._priority(model_id)), default=0)
            self._models[spec.model_id] = spec
            self._turns[spec.model_id] = fewest // max(1, spec.limit_priority)
            self._review()

    def remove(self, model_id: int) -> None:
        """Forget a model."""
        if self._models.pop(model_id, None) is not None:
            del self._turns[model_id]
            self._held.pop(model_id, None)
            self._kept.pop(model_id, None)
            self._review()

    def may_bind(self, model_id: int, cores: int) -> bool:
        """Whether a query of a model may have to wait where at most `cores` queries compute and none is stopped."""
        limits = self._models[model_id].limits if model_id in self._models else ()
        return any(cores * self._most[name] > self._available[name] for name, _, _ in limits)

    def own_limit(self, model_id: int) -> int:
        """Return how many queries of a limited model may be under way; 0: it depends on models that hold the same."""
        limits = self._models[model_id].limits
        is_own = all(self._sharers[name] == 1 for name, _, _ in limits)
        return min(self._available[name] // amount for name, amount, _ in limits) if is_own else 0

    def hold(self, front_end: int, model_id: int, count: int) -> bool:
        """So many queries of a front end, without a run under way, hold what the model needs.

        Return whether these are fewer than before.
        """
        told = count - self._held.get(model_id, {}).get(front_end, 0)
        if told > 0 and model_id in self._kept:
            del self._kept[model_id][:told]
            if not self._kept[model_id]:
                del self._kept[model_id]
        if count and model_id in self._models:
            self._held[model_id][front_end] = count
        elif model_id in self._held:
            self._held[model_id].pop(front_end, None)
            if not self._held[model_id]:
                del self._held[model_id]
        return told < 0

    def forget(self, front_end: int) -> None:
        """A front end has ended, and with it its queries."""
        for model_id in tuple(self._held):
            self.hold(front_end, model_id, 0)

    def keep(self, model_id: int, now_us: float) -> None:
        """A query will hold what the model needs, without a run under way. A front end tells of it; or it has ended."""
        if model_id in self._models:
            self._kept[model_id].append(now_us + KEPT_US)

    def next_us(self, now_us: float) -> float | None:
        """Return until when a front end is waited for that tells of such a query; None: for none."""
        if not self._kept:
            return None
        for model_id, ends_us in list(self._kept.items()):
            ends_us[:] = [end_us for end_us in ends_us if end_us > now_us]
            if not ends_us:
                del self._kept[model_id]
        return min((end_us for ends_us in self._kept.values() for end_us in ends_us), default=None)

    def is_held(self, model_id: int) -> bool:
        """Whether queries of a model hold something without a run under way."""
        return model_id in self._held or model_id in self._kept

    def started(self, model_id: int, count: int = 1) -> None:
        """Count queries that have begun."""
        if model_id in self._models:
            self._turns[model_id] += count

    def refused_before(self, query: Query) -> int | None:
        """Return the number of the query that a newcomer waits for: of its model, more urgent, and not admissible.

        As `admissible` found last; None: of none. While that one waits on, the newcomer cannot begin either.
        """
        refused = self._refused.get(query.model_id) if self._refused else None
        return refused[3] if refused is not None and not _has_its_own(query) and _urgency(query) > refused else None

    def admissible(self, waiting: Sequence[Query], under_way: Iterable[int], most: int) -> Sequence[Query]:
        """Return the waiting queries that may run now, in the given order; all of those returned may run together.

        `under_way` has the model of each query that has begun, but for those that go on with what is held; there can be
        `most` of them. Where not all may begin, models that had fewer turns, times their priority of Triton's rate
        limiter, go first; then counts how urgent the query is.
        """
        binding = self._binding.get(most)
        if binding is None:
            binding = self._binding[most] = frozenset([model for model in self._models if self.may_bind(model, most)])
        if self._held or self._kept:
            binding = binding.union(self._held, self._kept)
        self._refused = {}
        limited: dict[int, list[tuple[Urgency, Query]]] = {}
        for query in waiting:
            if query.model_id in binding and not _has_its_own(query):
                limited.setdefault(query.model_id, []).append((_urgency(query), query))
        if not limited:
            return waiting
        admitted = self._admitted(limited, self._free(under_way))
        return [
            query
            for query in waiting
            if query.model_id not in binding or query.query_id in admitted or _has_its_own(query)
        ]

    def _admitted(self, limited: dict[int, list[tuple[Urgency, Query]]], free: dict[str, int]) -> set[int]:
        """Give what is free to one query after the other. Queries of one model need the same, so one stands for all."""
        for queries in limited.values():
            heapq.heapify(queries)
        admitted: set[int] = set()
        turns = dict.fromkeys(limited, 0)
        while limited:
            model_id = min(limited, key=lambda model: (self._share(model, turns[model]), limited[model][0]))
            queries = limited[model_id]
            if all(free[name] >= amount for name, amount, _ in self._models[model_id].limits):
                self._take(free, model_id)
                admitted.add(heapq.heappop(queries)[1].query_id)
                turns[model_id] += 1
            else:
                self._refused[model_id] = queries[0][0]
                queries.clear()
            if not queries:
                del limited[model_id]
        return admitted

    def _priority(self, model_id: int) -> int:
        return self._models[model_id].limit_priority

    def _share(self, model_id: int, more: int = 0) -> int:
        return (self._turns[model_id] + more) * self._priority(model_id)

    def _free(self, under_way: Iterable[int]) -> dict[str, int]:
        """Return what is free of each resource; less than nothing, if there was more of it before."""
        free = dict(self._available)
        for model_id in under_way:
            self._take(free, model_id)
        for model_id, counts in self._held.items():
            self._take(free, model_id, sum(counts.values()))
        for model_id, ends_us in self._kept.items():
            self._take(free, model_id, len(ends_us))
        return free

    def _take(self, free: dict[str, int], model_id: int, count: int = 1) -> None:
        """Take what so many queries of a model hold from what is free."""
        spec = self._models.get(model_id)
        for name, amount, _ in spec.limits if spec is not None else ():
            free[name] -= count * amount

    def _review(self) -> None:
        """There is as much of a resource as the model says that says most."""
        self._available, self._most, self._sharers, self._binding = {}, {}, Counter(), {}
        for spec in self._models.values():
            for name, amount, available in spec.limits:
                self._sharers[name] += 1
                self._available[name] = max(available, self._available.get(name, 0))
                self._most[name] = max(amount, self._most.get(name, 0))


def _has_its_own(query: Query) -> bool:
    """Whether it holds already what it needs: it has begun, or goes on with what has."""
    return query.started or query.join_key == GOES_ON


def _urgency(query: Query) -> Urgency:
    """Order queries; the last part is there so that no two are equal."""
    deadline_us = float("inf") if query.deadline_us is None else query.deadline_us
    return query.priority, deadline_us, query.arrival_us, query.query_id


class ModelState(Enum):
    """LOADING: queries wait. SERVING: they run. IDLE: the first one has it loaded. UNLOADING: new ones are refused."""

    LOADING = auto()
    SERVING = auto()
    IDLE = auto()
    UNLOADING = auto()


@dataclass
class Model:
    """One loaded artifact; `spec.model_id` names it everywhere."""

    spec: LoadModel
    state: ModelState = ModelState.LOADING
    refusal: SlotStatus = SlotStatus.UNAVAILABLE  # of requests that come while it is UNLOADING
    asked_us: float = 0.0  # when a request has come last, or it has become servable
    is_waited_for: bool = False  # a request has come while it was IDLE

    @property
    def load(self) -> LoadArtifact:
        """The workers' command."""
        return LoadArtifact(self.spec.model_id, self.spec.key, self.is_waited_for)


class ModelTable:
    """Artifacts by number, and the profiles of the models that are being served.

    `cores`: of the largest gang; every profile has times for 1 to so many. `former`: is told of models, too.
    `in_bf16`: is kept up to date: artifacts in bf16, and the model of each, which has the number of that in fp32.
    """

    def __init__(
        self, cores: int, former: BatchFormer | None = None, in_bf16: MutableMapping[int, int] | None = None
    ) -> None:
        self._cores = cores
        self._former = former
        self._models: dict[int, Model] = {}
        self._profiles: dict[int, ModelProfile] = {}  # by model
        self._tables: dict[int, ModelProfile] = {}  # by artifact
        self._kept: dict[int, ModelProfile] = {}  # of artifacts that are not loaded, since they are idle
        self._misjudged: Counter[int] = Counter()  # runs in succession
        self._runs: dict[int, tuple[float, float]] = {}  # by model: when the last run ended, and the shortest time
        self._in_bf16 = {} if in_bf16 is None else in_bf16
        self.limits = RateLimiter()
        self.any_loading = False  # a query may wait for a model without a profile
        self.any_unloading = False  # the end of a gang may be waited for
        self.changes = 0  # of models or their profiles, counted

    @property
    def profiles(self) -> Mapping[int, ModelProfile]:
        """What policies see of the models that queries may run on now, in all their precisions."""
        return self._profiles

    @property
    def tables(self) -> Mapping[int, ModelProfile]:
        """The profiles of the artifacts, each by itself."""
        return self._tables

    def artifact_id(self, query: Query, precision: str = "") -> int:
        """Return what computes a query that begins in this precision; "": in its own."""
        model = self._profiles.get(query.model_id)
        if model is None or model.in_bf16 is None:
            return query.model_id
        return model.at(precision or query.precision).model_id

    def add(self, spec: LoadModel) -> Model:
        """Begin with an artifact. Limits and batches are those of its model."""
        model = self._models[spec.model_id] = Model(spec)
        if spec.fp32_id >= 0:
            self._in_bf16[spec.model_id] = spec.fp32_id
        else:
            self.limits.add(spec)
            if self._former is not None:
                self._former.add(spec)
        self._review()
        return model

    def get(self, model_id: int) -> Model | None:
        """Return the artifact of this number, None for an unknown one."""
        return self._models.get(model_id)

    def specs(self) -> list[LoadModel]:
        """Return what was said of every model that is not unloaded yet."""
        return [model.spec for model in self._models.values()]

    def in_state(self, state: ModelState) -> list[Model]:
        """Return the models in one state."""
        return [model for model in self._models.values() if model.state is state]

    def loads(self) -> list[LoadArtifact]:
        """Return what a new worker must load."""
        loaded = (ModelState.LOADING, ModelState.SERVING)
        return [model.load for model in self._models.values() if model.state in loaded]

    def serve(self, model: Model) -> None:
        """LOADING -> SERVING."""
        model.state, model.is_waited_for = ModelState.SERVING, False
        self._review()
        kept = self._kept.pop(model.spec.model_id, None)
        self._show(model.spec.model_id, kept or estimated_profile(model.spec, self._cores))

    def rest(self, model: Model) -> None:
        """SERVING -> IDLE. What is known of its times is kept."""
        model.state = ModelState.IDLE
        known = self._tables[model.spec.model_id]
        self._review()
        self._show(model.spec.model_id, None)
        self._kept[model.spec.model_id] = known

    def wake(self, model: Model) -> None:
        """IDLE -> LOADING."""
        model.state, model.is_waited_for = ModelState.LOADING, True
        self._review()

    def with_precisions(self, model_id: int) -> list[Model]:
        """Return a model's artifacts, the one of its number first."""
        numbers = [model_id, *(number for number, other in self._in_bf16.items() if other == model_id)]
        return [self._models[number] for number in numbers if number in self._models]

    def set_profile(self, message: SetProfile) -> None:
        """Note a model's measured latency, and what is asked of it."""
        known = self._known(message.model_id)
        if known is not None:
            if not known.measured:
                known = estimated_profile(self._models[message.model_id].spec, self._cores, message.isolated_us)
            profile = replace(
                known,
                isolated_us=message.isolated_us or known.isolated_us,
                qos_us=message.qos_us,
                rejects_late=message.rejects_late,
                varies=message.varies,
            )
            self._show(message.model_id, profile)

    def use_profile(self, model_id: int, profile: Profile) -> None:
        """Show policies a measured profile; the latency of the whole model stays that of the live server."""
        known = self._known(model_id)
        if known is None or len(profile.layers) != known.layers:
            return
        spec = self._models[model_id].spec
        measured = served_profile(profile, spec, self._cores)
        if spec.indivisible and known.isolated_us:  # of the sizes that were tried, on one core
            measured = scaled_profile(measured, known.isolated_us)
        measured = replace(
            measured,
            isolated_us=known.isolated_us or measured.isolated_us,
            qos_us=known.qos_us,
            rejects_late=known.rejects_late,
            varies=known.varies,
        )
        self._show(model_id, measured)

    def ran(self, model_id: int, run_us: float, ended_us: float = 0.0) -> None:
        """Note how long a request took from its first layer to its last, and when that ended."""
        self._runs[model_id] = ended_us, min(run_us, self._runs.get(model_id, (0.0, math.inf))[1])
        self._judge(model_id, run_us)

    def ran_each(self, model_id: int, runs_us: Sequence[float], ended_us: float) -> None:
        """Note the same of several requests, one after the other, and when the last one ended."""
        self._runs[model_id] = ended_us, min(*runs_us, self._runs.get(model_id, (0.0, math.inf))[1])
        known = self._tables.get(model_id)
        if model_id in self._misjudged or (known is not None and known.varies and known.indivisible):
            for run_us in runs_us:
                self._judge(model_id, run_us)

    def _judge(self, model_id: int, run_us: float) -> None:
        """See whether the time of a run speaks against the profile, and whether several do."""
        known = self._tables.get(model_id)
        if known is None or not is_misjudged(known, run_us):
            self._misjudged.pop(model_id, None)
            return
        self._misjudged[model_id] += 1
        if self._misjudged[model_id] == MISJUDGED_RUNS:
            del self._misjudged[model_id]
            seen = seen_profile(known, self._models[model_id].spec, self._cores, run_us)
            if seen.max_ranks != known.max_ranks:  # there is another core
                self._show(model_id, seen)

    def ran_us(self, model_id: int) -> float:
        """Return when a request to a model has run, the last time; 0: none has."""
        return self._runs.get(model_id, (0.0,))[0]

    def least_share(self, model_id: int, cores: int) -> float:
        """Return the share of the least time of one row on so many cores that a request has needed, 1 at most."""
        profile, (_, least_us) = self._tables.get(model_id), self._runs.get(model_id, (0.0, math.inf))
        expected_us = profile.fastest_us(0, cores) if profile is not None else 0.0
        return min(1.0, least_us / expected_us) if expected_us else 1.0

    def restrict(self, model: Model, alone: bool) -> None:
        """Let only one query of a model be under way at a time, or as many as its limits allow."""
        model = self._models.get(model.spec.fp32_id, model)
        own = (f"model {model.spec.model_id}", 1, 1)
        limits = tuple(limit for limit in model.spec.limits if limit != own)
        model.spec = structs.replace(model.spec, limits=(*limits, own) if alone else limits)
        self.limits.remove(model.spec.model_id)
        self.limits.add(model.spec)
        self._review()

    def begin_unload(self, model: Model) -> None:
        """Any state -> UNLOADING."""
        model.state = ModelState.UNLOADING
        self._kept.pop(model.spec.model_id, None)
        self._review()
        self._show(model.spec.model_id, None)
        self._in_bf16.pop(model.spec.model_id, None)
        self._misjudged.pop(model.spec.model_id, None)
        self._runs.pop(model.spec.model_id, None)

    def remove(self, model: Model) -> None:
        """Forget it."""
        del self._models[model.spec.model_id]
        self.limits.remove(model.spec.model_id)
        if self._former is not None:
            self._former.remove(model.spec.model_id)
        self._review()

    def _show(self, artifact_id: int, profile: ModelProfile | None) -> None:
        """Let policies see the times of an artifact among those of its model; None: not any more.

        Those of an idle one are kept for its return.
        """
        if profile is not None and artifact_id in self._kept:
            self._kept[artifact_id] = profile
            return
        self.changes += 1
        if profile is None:
            self._tables.pop(artifact_id, None)
        else:
            self._tables[artifact_id] = profile
        model_id = self._in_bf16.get(artifact_id, artifact_id)
        if (exact := self._tables.get(model_id)) is None:
            self._profiles.pop(model_id, None)
        else:
            fast = [self._tables[each] for each in self._tables if self._in_bf16.get(each) == model_id]
            self._profiles[model_id] = replace(exact, in_bf16=fast[0]) if fast else exact

    def _known(self, artifact_id: int) -> ModelProfile | None:
        return self._tables.get(artifact_id) or self._kept.get(artifact_id)

    def _review(self) -> None:
        self.changes += 1
        states = {model.state for model in self._models.values()}
        self.any_loading = ModelState.LOADING in states
        self.any_unloading = ModelState.UNLOADING in states
