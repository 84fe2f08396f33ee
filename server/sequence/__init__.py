"""Sequences: requests that belong together, executed one after the other, with state from one to the next.

docs/sequences.md says what clients see. `settings` reads the configuration, `batcher` decides which request may be
executed (no clock, lock or thread of its own), `memory` keeps states, `sequences` has the locks, threads and waits.
"""
