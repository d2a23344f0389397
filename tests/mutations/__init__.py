"""Two thousand damaged files: each ends in a clear error, or in a trace that says what was wrong with it."""
