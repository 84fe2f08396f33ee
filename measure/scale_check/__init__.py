"""`gangway scale-check`: what this machine's cores do together, beside what the simulator predicts of them."""
