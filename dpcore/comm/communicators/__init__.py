"""What a program calls to communicate: dpcore's communicators, and others with the same calls."""
