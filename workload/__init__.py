"""The load of a server: mixes of models, arrivals, targets, and the outcomes of queries.

The same for real and simulated servers. Pure, except for reading and writing files.
"""
