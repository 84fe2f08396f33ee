"""Several servers: routers, placement, the check of a large machine."""
