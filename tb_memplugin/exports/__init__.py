"""A trace as a file that another program reads: one module per format, `write(trace, path, ...)` in each.

Every writer fills a temporary file beside the one that was asked for and renames it at the end, so that
nobody ever reads half a file.
"""
