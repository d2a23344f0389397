"""A memory snapshot as a training would leave it: a small caching allocator, and a model of names.

Everything in it is made up; its numbers are those of a 10-layer transformer on a 3.5 GiB device that runs
out of memory in its third step, on a longer batch. Nothing random: the same file every time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

K, M = 1 << 10, 1 << 20
Entry = dict[str, Any]
Key = tuple[int, tuple[int, int], bool]

CAPACITY = 3600 * M
GRAPH_POOL = (0, 1)
COMMUNICATION = 0x7F31A0C0
LAYERS, WIDTH, VOCABULARY = 10, 1024, 16_000
OF_A_LAYER = (3 * WIDTH * WIDTH, WIDTH * WIDTH, 4 * WIDTH * WIDTH, 4 * WIDTH * WIDTH, 2 * WIDTH)


@dataclass
class Block:
    """A stretch of a segment: in use, waiting for another stream, or free."""

    address: int
    size: int
    requested: int = 0
    state: str = "inactive"
    frames: list[Entry] = field(default_factory=list)


@dataclass
class Segment:
    key: Key
    address: int
    size: int
    blocks: list[Block]


class MadeAllocator:
    """Best fit among the free blocks of a pool and stream, else a new segment, as PyTorch's does it."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.trace: list[Entry] = []
        self.time = 1_763_000_000_000_000
        self.next_address = 0x7F0000000000
        self.reserved = 0

    def alloc(
        self, size: int, what: str, line: str, stream: int = 0, pool: tuple[int, int] = (0, 0)
    ) -> Block:
        """Take a block; an out-of-memory entry and a MemoryError where the device has no more."""
        frames, rounded = _frames(line), -(-size // 512) * 512
        key = (stream, pool, rounded <= M)
        found = self._best_fit(key, rounded) or self._grow(key, rounded, frames, what)
        segment, block = found
        rest = block.size - rounded
        if rest >= 512 if key[2] else rest > M:
            segment.blocks.insert(segment.blocks.index(block) + 1, Block(block.address + rounded, rest))
            block.size = rounded
        block.requested, block.state, block.frames = size, "active_allocated", frames
        self._write("alloc", block.address, size, key, frames, what)
        return block

    def let_go(self, block: Block) -> None:
        """Ask for a block to be freed, while another stream may still use it."""
        block.state = "active_pending_free"
        self._write("free_requested", block.address, block.requested, self._home(block).key, [], "")

    def free(self, block: Block) -> None:
        """Give a block back, and join it with its free neighbors."""
        segment = self._home(block)
        if block.state == "active_allocated":
            self.let_go(block)
        self._write("free_completed", block.address, block.requested, segment.key, [], "")
        block.state, block.requested = "inactive", 0
        blocks: list[Block] = []
        for one in segment.blocks:
            if blocks and blocks[-1].state == one.state == "inactive":
                blocks[-1].size += one.size
            else:
                blocks.append(one)
        segment.blocks = blocks

    def snapshot(self) -> dict[str, Any]:
        """What `torch.cuda.memory._snapshot()` would give."""
        return {
            "segments": [
                {
                    "device": 0,
                    "address": segment.address,
                    "total_size": segment.size,
                    "stream": segment.key[0],
                    "segment_pool_id": segment.key[1],
                    "segment_type": "small" if segment.key[2] else "large",
                    "is_expandable": False,
                    "frames": [],
                    "blocks": [
                        {
                            "address": block.address,
                            "size": block.size,
                            "requested_size": block.requested,
                            "state": block.state,
                            "frames": block.frames,
                        }
                        for block in segment.blocks
                    ],
                }
                for segment in self.segments
            ],
            "device_traces": [self.trace],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512",
                "max_split_size": 512 * M,
                "garbage_collection_threshold": 0.0,
                "expandable_segments": False,
            },
            "external_annotations": [],
        }

    def _best_fit(self, key: Key, size: int) -> tuple[Segment, Block] | None:
        fits = [
            (block.size, block.address, segment, block)
            for segment in self.segments
            if segment.key == key
            for block in segment.blocks
            if block.state == "inactive" and block.size >= size
        ]
        return min(fits, key=lambda fit: fit[:2])[2:] if fits else None

    def _grow(self, key: Key, size: int, frames: list[Entry], what: str) -> tuple[Segment, Block]:
        total = 2 * M if key[2] else 20 * M if size < 10 * M else -(-size // (2 * M)) * 2 * M
        if self.reserved + total > CAPACITY:
            self._write("oom", 0, size, key, frames, what)
            self.trace[-1]["device_free"] = CAPACITY - self.reserved
            raise MemoryError
        block = Block(self.next_address, total)
        segment = Segment(key, self.next_address, total, [block])
        self.next_address += total + 2 * M
        self.reserved += total
        self.segments.append(segment)
        self._write("segment_alloc", segment.address, total, key, frames, what)
        return segment, block

    def _home(self, block: Block) -> Segment:
        return next(
            segment for segment in self.segments if 0 <= block.address - segment.address < segment.size
        )

    def _write(self, action: str, address: int, size: int, key: Key, frames: list[Entry], what: str) -> None:
        self.time += 23 + size // 400_000
        told = {"action": action, "addr": address, "size": size, "stream": key[0], "pool_id": key[1]}
        self.trace.append({**told, "time_us": self.time, "frames": frames, "user_metadata": what})


def _frames(line: str) -> list[Entry]:
    function, file, number = line.split()
    return [
        {"name": "at::native::empty_cuda", "filename": "??", "line": 0},
        {"name": function, "filename": f"/home/made/{file}", "line": int(number)},
        {"name": "step", "filename": "/home/made/train.py", "line": 88},
        {"name": "main", "filename": "/home/made/train.py", "line": 121},
    ]


def made_snapshot() -> dict[str, Any]:
    """Parameters and optimizer state, a captured graph, two steps, and a third that does not fit."""
    allocator = MadeAllocator()
    take = allocator.alloc
    shapes = [VOCABULARY * WIDTH, *OF_A_LAYER * LAYERS]
    for size in shapes:
        take(4 * size, "parameter", "__init__ model.py 31")
    for size in shapes * 2:
        take(4 * size, "optimizer_state", "adamw optimizer.py 57")
    for size in (24 * M, 3 * M, 600 * K):
        take(size, "workspace", "capture graphs.py 19", pool=GRAPH_POOL)
    for tokens in (6_200, 5_300, 9_600):
        try:
            _step(allocator, shapes, tokens)
        except MemoryError:
            break
    return allocator.snapshot()


def _step(allocator: MadeAllocator, shapes: list[int], tokens: int) -> None:
    take, kept, waiting = allocator.alloc, [], []
    batch = take(8 * tokens, "input", "collate data.py 12")
    for _ in range(LAYERS):
        kept.append(take(4 * tokens * WIDTH, "activation", "attention model.py 64"))
        scratch = take(6 * tokens * WIDTH, "temporary", "softmax model.py 70")
        kept.append(take(8 * tokens * WIDTH, "activation", "mlp model.py 92"))
        kept.append(take(tokens * 4, "activation", "norm model.py 48"))
        allocator.free(scratch)
    try:
        logits = take(2 * tokens * VOCABULARY, "activation", "head model.py 101")
    except MemoryError:
        for block in [*kept, batch]:  # as the exception unwinds
            allocator.free(block)
        raise
    gradients = []
    for number, size in enumerate(reversed(shapes)):
        gradients.append(take(4 * size, "gradient", "backward train.py 90"))
        if kept and number % 2:
            allocator.free(kept.pop())
        bucket = take(2 * size, "communication", "all_reduce ddp.py 44", stream=COMMUNICATION)
        allocator.let_go(bucket)
        waiting.append(bucket)
        if len(waiting) > 3:
            allocator.free(waiting.pop(0))
    for block in [*waiting, *kept, logits, *gradients, batch]:
        allocator.free(block)
