"""The made snapshot with call stacks as deep as a training's: modules, PyTorch's own calls, C++ below."""

from __future__ import annotations

from typing import Any

from tests.browser.made_snapshot import Entry, made_snapshot

TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
MODEL, TRAIN = "/home/made/model.py", "/home/made/train.py"


def frame(name: str, filename: str = "??", line: int = 0) -> Entry:
    return {"name": name, "filename": filename, "line": line}


CALL = (
    frame("_call_impl", f"{TORCH}/nn/modules/module.py", 1790),
    frame("_wrapped_call_impl", f"{TORCH}/nn/modules/module.py", 1779),
)
ALLOCATOR = (
    frame("torch::unwind::unwind()"),
    frame("c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::malloc(void**, int)"),
    frame("at::detail::empty_cuda(c10::ArrayRef<long>, c10::ScalarType)"),
)
PROGRAM = (frame("main", TRAIN, 121), frame("<module>", TRAIN, 140))
STEP = (frame("step", TRAIN, 88), *PROGRAM)
BLOCK = (frame("forward", MODEL, 40), *CALL, frame("forward", MODEL, 110), *CALL, *STEP)


def inside(*frames: Entry) -> list[Entry]:
    return [*ALLOCATOR, *frames]


STACKS = {
    "attention": inside(
        frame("linear", f"{TORCH}/nn/functional.py", 125), frame("attention", MODEL, 64), *CALL, *BLOCK
    ),
    "softmax": inside(
        frame("softmax", f"{TORCH}/nn/functional.py", 2140),
        frame("softmax", MODEL, 70),
        frame("attention", MODEL, 66),
        *CALL,
        *BLOCK,
    ),
    "mlp": inside(frame("linear", f"{TORCH}/nn/functional.py", 125), frame("mlp", MODEL, 92), *CALL, *BLOCK),
    "norm": inside(
        frame("layer_norm", f"{TORCH}/nn/functional.py", 2935), frame("norm", MODEL, 48), *CALL, *BLOCK
    ),
    "head": inside(frame("head", MODEL, 101), *CALL, frame("forward", MODEL, 114), *CALL, *STEP),
    "adamw": inside(
        frame("_init_group", f"{TORCH}/optim/adamw.py", 130),
        frame("step", f"{TORCH}/optim/adamw.py", 220),
        frame("adamw", "/home/made/optimizer.py", 57),
        *STEP,
    ),
    "__init__": inside(
        frame("__init__", f"{TORCH}/nn/modules/linear.py", 106), frame("__init__", MODEL, 31), *PROGRAM
    ),
    "capture": inside(frame("capture", "/home/made/graphs.py", 19), *PROGRAM),
    "collate": inside(frame("collate", "/home/made/data.py", 12), *PROGRAM),
    "backward": inside(
        frame("at::native::mm_out(at::Tensor const&, at::Tensor const&, at::Tensor&)"),
        frame("torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"),
        frame("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)"),
    ),
    "all_reduce": [],
}
"""By the function that the made snapshot names: the backward has C++ alone, communication nothing at all."""


def stacked_snapshot() -> dict[str, Any]:
    """The made snapshot, deeper."""
    made = made_snapshot()
    for entry in made["device_traces"][0]:
        entry["frames"] = deeper(entry["frames"])
    for segment in made["segments"]:
        for block in segment["blocks"]:
            block["frames"] = deeper(block["frames"])
    return made


def deeper(frames: list[Entry]) -> list[Entry]:
    return STACKS[frames[1]["name"]] if frames else []
