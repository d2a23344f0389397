"""The source line of every allocation, thread by thread."""
