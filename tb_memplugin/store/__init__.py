"""Recordings on disk: summaries in event files, every event in side files."""
