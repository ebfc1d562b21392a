"""Exercises that check themselves: what ``dpcore exercise`` runs."""
