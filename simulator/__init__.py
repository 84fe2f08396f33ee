"""The discrete-event simulator: the live scheduler's policies on a virtual clock and a modelled machine."""
