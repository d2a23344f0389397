"""Mosaic's analysis."""
