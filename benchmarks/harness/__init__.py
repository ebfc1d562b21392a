"""What several benchmarks share besides `dpcore.tools.compare`, which measures side by side."""
