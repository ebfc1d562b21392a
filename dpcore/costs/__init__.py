"""What communication costs: constants of the machine, emulated links, and why an algorithm runs."""
