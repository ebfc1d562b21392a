"""What ``dpcore.trace`` records, and the file that it writes."""
