"""Tags of messages in a ring, by which ``dpcore show`` recognises them."""

SHIFT = 1 << 20  # activations, or keys and values
GRADIENTS = SHIFT + 1  # partial gradients of keys and values
