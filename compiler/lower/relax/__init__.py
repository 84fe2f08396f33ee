"""Operators without a template of our own, lowered by TVM's Relax: each of its functions becomes a layer."""
