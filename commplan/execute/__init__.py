"""Runs plans: lanes, collectives and the executor. Knows nothing of FSDP2; see `interface` for what drives it."""
