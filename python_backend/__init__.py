"""Host of a Python model: the process that imports model.py. Only the standard library and numpy, Python 3.9 or later.

It may run in another Python environment than the server, so it imports nothing of the other rooms.
"""
