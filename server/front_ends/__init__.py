"""Several front-end processes behind one address, and what they must agree on (docs/front_ends.md)."""
