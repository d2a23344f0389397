"""Figures of whole steps: counters, peaks and what they cost nothing to read."""
