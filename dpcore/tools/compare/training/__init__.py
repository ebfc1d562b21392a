"""What the benchmarks of data parallel training share: models, ranks, interleaved timing."""
