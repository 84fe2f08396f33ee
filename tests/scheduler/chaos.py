"""Decisions at random, as the contract of policies allows: to be carried out whatever else happens."""

import random

from gangway.scheduler.policy import Resize, Start, StartOver, Stop, Wake
from tests.scheduler.conftest import LAYERS


class Chaos:
    """Starts, stops, grows and shrinks at random, as the contract allows; lets queries start over if it may."""

    def __init__(self, seed, starts_over=False):
        self.starts_over = starts_over
        self.random = random.Random(seed)

    def __call__(self, snapshot):
        free = list(snapshot.free_cores)
        decisions = [Wake(snapshot.now_us + 200)]
        for block in snapshot.running:
            act = self.random.randrange(6)
            if act == 0:
                decisions.append(Stop(block.query.query_id, at_once=self.random.random() < 0.5))
            elif act == 1 and len(block.cores) == 2:
                decisions.append(Resize(block.query.query_id, block.cores[:1]))
            elif act == 2 and free and not block.stopping:
                decisions.append(Resize(block.query.query_id, (*block.cores, free.pop())))
        for query in snapshot.waiting[: self.random.randrange(4)]:
            if free:
                cores = tuple(free[: self.random.randint(1, len(free))])
                free = free[len(cores) :]
                decisions.append(Start(query.query_id, self.random.randint(query.next_layer + 1, LAYERS), cores))
            elif query.started and self.starts_over:
                decisions.append(StartOver(query.query_id))
        return decisions
