"""From layers to steps: fusion, layouts, halos and the arena. Everything is placed in memory."""
