"""What training takes in memory."""
