"""The supervisor's process: the repository of models, and the processes that serve them.

One event loop calls everything here and never blocks. What threads may call, or takes its time, says so.
"""
