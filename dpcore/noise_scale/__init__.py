"""How noisy the gradients of a step are: ``dpcore.gradient_noise_scale``."""
