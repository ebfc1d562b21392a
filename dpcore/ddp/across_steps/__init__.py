"""Schedules that go on under the next forward, and the optimizer that they need."""
