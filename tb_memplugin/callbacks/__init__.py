"""Recording memory inside other people's training loops, by their own callbacks.

`transformers` and `lightning` each have a `MemoryTraceCallback`; neither library is needed by the other,
nor by the rest of the package.
"""
