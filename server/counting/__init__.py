"""Counters of models in shared memory: they outlive the process that counts, and add up over several."""
