"""Kernel templates in TIR. The door is `registry.py`: plan, versions, pack and emit."""
