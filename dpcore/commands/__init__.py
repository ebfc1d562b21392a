"""What the command line runs: bench, inspect, doctor; show and simulate are folders themselves."""
