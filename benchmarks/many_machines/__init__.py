"""Several servers: routers, placement, Ray, the check of a large machine."""
