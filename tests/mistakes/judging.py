"""What ranks were told."""


def of(told, *hows):
    """Messages of all ranks, the earliest first."""
    said = [message for rank in told for message in rank if message.how in hows]
    return sorted(said, key=lambda message: message.step)
