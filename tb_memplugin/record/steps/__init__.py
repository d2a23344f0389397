"""Record the figures of whole steps from counters that torch or the system keeps."""
