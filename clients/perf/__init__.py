"""`gangway perf`: open-loop load on a server, and the highest rate that it carries."""
