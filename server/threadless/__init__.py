"""Requests that have no thread of their own while they wait: docs/front_end_cost.md."""
