"""An accelerator with a memory engine and a compute engine, and three ways to share it: Layerweaver+'s evaluation.

The memory engine fetches the weights of scheduled layers, in order, as far ahead as the buffer has room; the compute
engine executes them in the same order. A layer is chosen when the memory engine can begin with it, so as late as it
may be. `weaving` chooses, the same code as on CPUs. The waiting requests of a model become a batch when its first layer
is chosen, for every scheduler alike; one batch of each model is on its way at a time (more of them would fetch the same
weights again and again, each for a few requests).

Loose ends. Idle time is that of both engines: of compute while it waits for the fetch, of memory while the buffer is
full, and while compute lags by more than the memory needs to fill the whole buffer (being further ahead hides nothing,
so no layer is chosen until compute has caught up). A layer that computes for longer than that stalls the memory
whenever it runs; that part is not held against it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.papers.npu_models import Npu, NpuModel
from gangway.scheduler.policies.layerweaver import LayerCandidate, LayerChoice, least_idle, two_modes
from gangway.workload.arrivals import Arrivals, Floats

Choose = Callable[[Sequence[LayerCandidate]], LayerChoice]
WEAVERS: dict[str, Choose] = {"layerweaver": least_idle, "layerweaver_plus": two_modes}
BASELINE = "baseline"
SCHEDULERS = (BASELINE, *WEAVERS)


@dataclass(frozen=True)
class Tenant:
    """A stream of requests."""

    model: NpuModel
    qos_us: float


@dataclass(slots=True, eq=False)
class Job:
    """A batch on its way, or about to begin."""

    tenant: int
    requests: list[int]
    arrival_us: float  # of the oldest
    due_us: float
    memory_us: Sequence[float]  # [L]
    compute_us: Sequence[float]  # [L], of the batch
    remaining_us: Sequence[float]  # [L]
    weight_bytes: Sequence[float]  # [L]
    layer: int = 0


@dataclass
class Engines:
    """What was scheduled so far."""

    npu: Npu
    memory_us: float = 0.0  # the last fetch ends
    compute_us: float = 0.0  # T_PE: the last layer ends
    held: deque[tuple[float, float]] = field(default_factory=deque)  # (until, bytes) in the buffer, in order
    held_bytes: float = 0.0

    def next_choice_us(self) -> float:
        """Return when the next layer can be chosen at the earliest."""
        return max(self.memory_us, self.compute_us - self.npu.buffer_us)

    def release(self, now_us: float) -> None:
        """Forget weights that were used."""
        while self.held and self.held[0][0] <= now_us:
            self.held_bytes -= self.held.popleft()[1]

    def room_us(self, size_bytes: float, now_us: float) -> float:
        """Return when the buffer has so much room."""
        surplus = self.held_bytes + size_bytes - self.npu.buffer_bytes
        for until_us, held_bytes in self.held:
            if surplus <= 0:
                break
            surplus -= held_bytes
            now_us = until_us
        return now_us

    def plan(self, job: Job, now_us: float) -> tuple[float, float, float]:
        """Return when the fetch of the job's next layer would end, when its compute, and the idle time that adds."""
        layer = job.layer
        fetch_us, work_us = job.memory_us[layer], job.compute_us[layer]
        begin_us = self.room_us(job.weight_bytes[layer], now_us)
        fetched_us = begin_us + fetch_us
        ready_us = max(self.compute_us, now_us)
        end_us = max(ready_us, fetched_us) + work_us
        buffer_us = self.npu.buffer_us
        idle_us = begin_us - now_us + max(0.0, fetched_us - ready_us) + max(0.0, end_us - buffer_us - fetched_us)
        return fetched_us, end_us, idle_us - max(0.0, work_us - fetch_us - buffer_us)

    def take(self, job: Job, now_us: float) -> float:
        """Schedule the job's next layer; return when it will have been computed."""
        self.memory_us, self.compute_us, _ = self.plan(job, now_us)
        self.held.append((self.compute_us, job.weight_bytes[job.layer]))
        self.held_bytes += job.weight_bytes[job.layer]
        job.layer += 1
        return self.compute_us


class Queues:
    """Requests that wait, by tenant, and the batches that they become."""

    def __init__(self, tenants: Sequence[Tenant], arrivals: Arrivals, most: int) -> None:
        self._tenants = tenants
        self._times_us: list[float] = arrivals.times_us.tolist()
        self._models: list[int] = arrivals.models.tolist()
        self._most = most
        self._next = 0
        self._waiting: list[deque[int]] = [deque() for _ in tenants]
        self._heads: list[Job | None] = [None for _ in tenants]
        self._shapes: dict[tuple[int, int], tuple[tuple[float, ...], tuple[float, ...]]] = {}

    @property
    def next_us(self) -> float | None:
        """When the next request arrives; None after the last."""
        return self._times_us[self._next] if self._next < len(self._times_us) else None

    def admit(self, now_us: float) -> None:
        """Queue what has arrived."""
        while self._next < len(self._times_us) and self._times_us[self._next] <= now_us:
            tenant = self._models[self._next]
            self._waiting[tenant].append(self._next)
            if len(self._waiting[tenant]) <= self._most:
                self._heads[tenant] = self._job(tenant)
            self._next += 1

    def heads(self) -> list[Job]:
        """Return the batch that would be started next, of each tenant that has requests."""
        return [head for head in self._heads if head is not None]

    def start(self, job: Job) -> None:
        """Take its requests out of the queue."""
        waiting = self._waiting[job.tenant]
        for _ in job.requests:
            waiting.popleft()
        self._heads[job.tenant] = self._job(job.tenant) if waiting else None

    def _job(self, tenant: int) -> Job:
        waiting = self._waiting[tenant]
        requests = [waiting[index] for index in range(min(self._most, len(waiting)))]
        model = self._tenants[tenant].model
        key = (tenant, len(requests))
        if key not in self._shapes:
            compute_us = tuple(time_us * len(requests) for time_us in model.compute_us)
            self._shapes[key] = (compute_us, model.remaining_us(len(requests)))
        compute_us, remaining_us = self._shapes[key]
        arrival_us = self._times_us[requests[0]]
        due_us = arrival_us + self._tenants[tenant].qos_us
        return Job(tenant, requests, arrival_us, due_us, model.memory_us, compute_us, remaining_us, model.weight_bytes)


def serve(
    scheduler: str, tenants: Sequence[Tenant], arrivals: Arrivals, npu: Npu, most: int = 1, give_up: int | None = None
) -> Floats:
    """Return the latency of each request [Q] in microseconds.

    `arrivals.models` are indices of tenants, `most` is the largest batch. With `give_up` the run ends once so many
    requests were late; those without an answer then have infinite latency. Raises KeyError for an unknown scheduler.
    """
    latency_us = np.full(len(arrivals), np.inf)
    late = 0
    run = (
        _alone(tenants, arrivals, npu, most)
        if scheduler == BASELINE
        else _woven(WEAVERS[scheduler], tenants, arrivals, npu, most)
    )
    for job, end_us in run:
        for request in job.requests:
            latency_us[request] = end_us - arrivals.times_us[request]
            late += bool(latency_us[request] > tenants[job.tenant].qos_us)
        if give_up is not None and late >= give_up:
            break
    return latency_us


def _woven(
    choose: Choose, tenants: Sequence[Tenant], arrivals: Arrivals, npu: Npu, most: int
) -> Iterator[tuple[Job, float]]:
    """Choose layer by layer; yield each batch with the time of its end."""
    queues, engines = Queues(tenants, arrivals, most), Engines(npu)
    active: dict[int, Job] = {}  # by tenant
    now_us = 0.0
    while True:
        now_us = max(now_us, engines.next_choice_us())
        queues.admit(now_us)
        heads = [head for head in queues.heads() if head.tenant not in active]
        jobs = sorted([*active.values(), *heads], key=lambda job: job.arrival_us)
        if not jobs:
            if queues.next_us is None:
                return
            now_us = queues.next_us
            continue
        engines.release(now_us)
        job = jobs[choose([_candidate(job, engines, now_us) for job in jobs]).index]
        if job.layer == 0:
            queues.start(job)
            active[job.tenant] = job
        end_us = engines.take(job, now_us)
        if job.layer == len(job.memory_us):
            del active[job.tenant]
            yield job, end_us


def _candidate(job: Job, engines: Engines, now_us: float) -> LayerCandidate:
    _, end_us, idle_us = engines.plan(job, now_us)
    return LayerCandidate(idle_us, end_us, job.due_us, job.remaining_us[job.layer])


def _alone(tenants: Sequence[Tenant], arrivals: Arrivals, npu: Npu, most: int) -> Iterator[tuple[Job, float]]:
    """One batch at a time, whoever has waited longest; its own layers are prefetched, nobody else's."""
    queues = Queues(tenants, arrivals, most)
    times_us: dict[tuple[int, int], float] = {}
    now_us = 0.0
    while True:
        queues.admit(now_us)
        heads = queues.heads()
        if not heads:
            if queues.next_us is None:
                return
            now_us = queues.next_us
            continue
        job = min(heads, key=lambda job: job.arrival_us)
        queues.start(job)
        key = (job.tenant, len(job.requests))
        if key not in times_us:
            times_us[key] = _alone_us(job, npu)
        now_us += times_us[key]
        yield job, now_us


def _alone_us(job: Job, npu: Npu) -> float:
    engines = Engines(npu)
    for _ in job.memory_us:
        now_us = engines.next_choice_us()
        engines.release(now_us)
        engines.take(job, now_us)
    return engines.compute_us
