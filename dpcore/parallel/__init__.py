"""Tensor, sequence and pipeline parallel models, over communicators that are passed in."""
