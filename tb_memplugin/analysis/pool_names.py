"""Display names of pools and streams."""

from __future__ import annotations

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.allocator import DEFAULT_POOL, PoolId

NOT_KNOWN = "(not known)"


def pool_key(pool: PoolId) -> str:
    """Return `default`, or `private (a, b)` for the pool of a CUDA graph or of a `torch.cuda.MemPool`."""
    return "default" if tuple(pool) == DEFAULT_POOL else f"private ({pool[0]}, {pool[1]})"


def stream_key(stream: int) -> str:
    """Return `default stream`, or `stream` and the stream's pointer in hexadecimal."""
    return f"stream {stream:#x}" if stream else "default stream"


def stream_name(trace: MemoryTrace, row: int) -> str:
    """Return the display name of a row of `trace.streams`: "default stream", "stream 0x7f…", ..."""
    return stream_key(trace.streams[row]) if 0 <= row < len(trace.streams) else NOT_KNOWN


def pool_name(trace: MemoryTrace, row: int) -> str:
    """Return the display name of a row of `trace.pools`: "default", "private (a, b)", "(not known)"."""
    return pool_key(trace.pools[row]) if 0 <= row < len(trace.pools) else NOT_KNOWN
