"""How many queries can be under way at once, in the live server and in the simulator."""

LEAST_LEASES = 16
LEASES_PER_WORKER = 4


def lease_count(workers: int) -> int:
    """Return how many queries can be under way: some at work, the others stopped; and an urgent one finds a lease."""
    return max(LEAST_LEASES, LEASES_PER_WORKER * workers)
