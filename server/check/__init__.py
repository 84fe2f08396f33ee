"""`gangway check`: which models of a Triton repository can be served here, and what must change for the others.

`repairs.py` knows what can be changed, `trial.py` asks a server of its own whether a model loads, and `command.py`
shows what comes of it.
"""
