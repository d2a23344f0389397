"""Write a trace in a format that another program reads: one module per format, each with a `write` function.

Every writer fills a temporary file beside the requested one and renames it at the end, so that no reader
sees an incomplete file.
"""
