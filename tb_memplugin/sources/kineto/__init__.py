"""Kineto's JSON traces, of any era."""
