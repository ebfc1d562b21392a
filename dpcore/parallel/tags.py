"""Tags of the messages that go round a ring; dpcore show knows them by these."""

SHIFT = 1 << 20  # activations, or keys and values
GRADIENTS = SHIFT + 1  # what is known of keys' and values' gradients, behind them
