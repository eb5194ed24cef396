"""Measuring: one timer, the peers, the suites."""
