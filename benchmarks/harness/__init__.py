"""What several benchmarks share besides `dpcore.compare`, which measures side by side."""
