"""The scheduling policies, one a file. Pure: the live server and the simulator drive the same ones."""
