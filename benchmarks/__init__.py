"""One script per question; all of them share `benchmarks.harness`. See `--help` of each."""
