"""`log_to=`: figures of steps and reports in the experiment trackers that a program uses already.

Each tracker is a file here with its class, and a line in `TRACKERS` of `log.py`.
"""
