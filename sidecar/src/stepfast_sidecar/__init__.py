"""The node's checkpoint agent. Run it with `python -m stepfast_sidecar --help`."""
