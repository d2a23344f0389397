"""Recordings on disk: event files contain summaries, side files contain every event."""
