"""The doing: pinned worker processes, gangs, rings and shared memory; `native/` holds the hot loop in C."""
