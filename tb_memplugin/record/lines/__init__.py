"""Record the source line of every allocation, on every thread."""
