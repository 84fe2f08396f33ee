"""Kernel templates in TIR. `registry.py` is the interface: plan, versions, pack and emit."""
