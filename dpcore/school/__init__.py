"""To learn with: exercises and notebooks."""
