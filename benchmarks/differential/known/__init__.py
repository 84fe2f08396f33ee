"""What differs from Triton, and why."""
