"""`gangway report`: the papers' pictures of one model on this machine, from its stored profile and tuning."""
