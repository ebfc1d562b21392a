"""Compiled models: gradients that leave while the one graph of backward still runs."""
