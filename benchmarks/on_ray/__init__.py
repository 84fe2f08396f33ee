"""Servers as replicas of a Ray deployment: `deploy/ray`."""
