"""The parts of a wrapped model, one module per job."""
