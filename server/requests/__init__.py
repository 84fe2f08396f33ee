"""One request, from the client's bytes to shared memory and back: what both sides of the wall use."""
