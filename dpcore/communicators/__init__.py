"""What a program calls to communicate: dpcore's communicators, and others' behind equal calls."""
