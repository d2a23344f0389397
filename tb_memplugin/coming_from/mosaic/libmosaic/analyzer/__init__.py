"""Mosaic's classes that read and analyse a snapshot."""
