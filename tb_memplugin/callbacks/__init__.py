"""Callbacks that record memory in the training loops of other libraries.

The modules `transformers` and `lightning` each have a `MemoryTraceCallback`. Each needs only its own library,
and the rest of the package needs neither.
"""

import tb_memplugin.record  # noqa: F401  # before any module here, see there
