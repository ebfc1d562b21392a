"""What the parts of a wrapped model have in common, one module per job."""
