"""Capture in other libraries' training loops; each module needs its library."""
