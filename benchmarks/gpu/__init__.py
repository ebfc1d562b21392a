"""What the GPU part reaches on one GPU: `python -m benchmarks.gpu`."""
