"""The decisions: pure policies, and the live process that applies them."""
