"""Policies and the scheduler: what parts, decisions and turns cost or gain."""
