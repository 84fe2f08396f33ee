"""Kernel templates in TIR. See `registry.py`: plan(spec, target), versions(spec, target), pack(plan, weights),
emit(plan, symbol).
"""
