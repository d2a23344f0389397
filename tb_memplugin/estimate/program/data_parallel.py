"""Model the buckets of `DistributedDataParallel`: its C++ reducer needs addresses, which fake tensors lack.

The rules are those of torch/csrc/distributed/c10d/reducer.cpp (2.13):

- Each bucket is one flat buffer that lives as long as the model.
- The first backward uses one bucket for each dtype and device. Before the second forward, buckets are rebuilt
  in the order in which gradients became ready: the first of 1 MiB, the others of 25 MiB; or all of
  `bucket_cap_mb`, if that is given.
- A gradient that is ready is copied into its bucket; with `gradient_as_bucket_view` it becomes a view of it.
- A bucket is reduced once all its gradients are ready, in order of the buckets: in place, or by a
  communication hook.
- With `static_graph` the first backward is reduced at its end, and buckets are rebuilt before the third
  forward.
- Before 2.15, NCCL keeps what a hook sent until the first bucket of the next backward (communication.py).
- On a GPU, small tensors carry numbers to the other ranks: shapes at construction, the order of buckets,
  which parameters were used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.program.communication import watched
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches, do_nothing
from tb_memplugin.trace import Category

_BEFORE_2_15 = torch.torch_version.TorchVersion(torch.__version__) < "2.15"
"""Whether NCCL's group gathers a list of tensors into one first, and keeps what a hook sent."""

Name = Callable[[torch.Tensor, Category, str], None]
"""`name(tensor, category, label)` sets the category and label of a tensor's memory."""


class DataParallel(Correction):
    """Replaces torch's reducer by `FakeReducer`."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace `torch.distributed.Reducer` and the functions that only use it."""
        if not dist.is_available():
            return
        from torch.nn.parallel import distributed

        def name(tensor: torch.Tensor, category: Category, label: str) -> None:
            block = mode.ledger.block_of(tensor.untyped_storage())
            if block is not None:
                block.category, block.label = category, label

        patches.set(dist, "Reducer", functools.partial(FakeReducer, name))
        patches.set(dist, "Logger", _Silent)
        patches.set(dist, "_register_comm_hook", FakeReducer.call_hook)
        patches.set(dist, "_register_builtin_comm_hook", FakeReducer.call_builtin_hook)
        patches.set(distributed, "_verify_param_shape_across_processes", _exchange_shapes)
        patches.set(distributed, "_setup_mixed_precision_params", _refuse_mixed_precision)
        if self.target.device_type == "cuda":
            _let_hooks_be_of_a_gpu(patches, distributed.DistributedDataParallel)


def _let_hooks_be_of_a_gpu(patches: Patches, owner: Any) -> None:
    """Allow bfloat16 communication hooks, which torch refuses where it has no NCCL."""
    original = owner._check_comm_hook

    def check(model: Any, hook: Any) -> None:
        if not getattr(hook, "__name__", "").startswith("bf16_compress"):
            original(model, hook)

    patches.set(owner, "_check_comm_hook", check)


class FakeReducer:
    """Models the memory of `torch.distributed.Reducer`; after `name` it takes the same arguments."""

    def __init__(
        self,
        name: Name,
        parameters: Sequence[torch.Tensor],
        bucket_indices: Sequence[Sequence[int]],
        per_bucket_size_limits: Sequence[int],
        process_group: Any,
        expect_sparse_gradients: Sequence[bool] = (),
        bucket_bytes_cap: int = 25 << 20,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        param_to_name_mapping: Any = None,
        first_bucket_bytes_cap: int = 1 << 20,
        skip_all_reduce_unused_params: bool = False,
        use_python_reducer: bool = False,
        limits_for_rebuilding: Sequence[int] = (),
        batched_grad_copy: bool = False,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        if any(expect_sparse_gradients):
            raise _refusal("with sparse gradients", "Use nn.Embedding(sparse=False).")
        if batched_grad_copy:
            raise _refusal("with batched_grad_copy=True", "Leave it out.")
        if lazy_bucket_allocation:
            raise _refusal("with lazy_bucket_allocation=True", "Leave it out.")
        self._name = name
        self._parameters = list(parameters)
        self._limits = list(limits_for_rebuilding) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._as_views = gradient_as_bucket_view
        self._group = process_group
        self._may_rebuild = not find_unused_parameters
        self._order: list[int] = []
        self._expects = self._static = self._delayed = False
        self._views: dict[int, torch.Tensor] = {}
        self._buckets: list[FakeBucket] = []
        self._ready_indices: set[int] = set()
        self._reduced = 0
        self._hook: Callable[[FakeBucket], Any] | None = None
        self._sent: list[list[torch.Tensor]] = []
        self._sent_before: list[list[torch.Tensor]] = []
        self._used: torch.Tensor | None = None
        self._make_buckets(bucket_indices)
        if find_unused_parameters:
            self._make_map_of_used()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Expect a backward whose gradients are reduced."""
        self._expects, self._reduced = True, 0
        self._ready_indices.clear()
        self._sent_before, self._sent = self._sent, []

    def call_hook(self, state: Any, hook: Callable[[Any, FakeBucket], Any]) -> None:
        """Use a communication hook of the program to reduce each bucket."""
        self._hook = functools.partial(hook, state)

    def call_builtin_hook(self, kind: Any) -> None:
        """Use one of torch's C++ communication hooks; its Python version, which does the same, is run."""
        from torch._C._distributed_c10d import BuiltinCommHookType
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        compress = kind == BuiltinCommHookType.FP16_COMPRESS
        hook: Any = default_hooks.fp16_compress_hook if compress else default_hooks.allreduce_hook
        self._hook = functools.partial(hook, self._group)

    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets in the order in which gradients became ready; return whether it was done.

        It happens once, when gradients of a first backward are known.
        """
        if not self._may_rebuild or not self._order:
            return False
        from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

        if len(self._order) != len(self._parameters):
            raise _refusal(
                f"whose first backward produced {len(self._order)} of {len(self._parameters)} "
                "gradients, which fails in torch itself too (Reducer::rebuild_buckets),",
                "Use find_unused_parameters=True if some parameters are not used. In a pipeline, use "
                "more micro-batches than stages (and not GPipe), or give the stages their input_args "
                "and output_args.",
            )
        self._may_rebuild = False
        buckets, _ = _compute_bucket_assignment_by_size(
            [self._parameters[index] for index in self._order],
            self._limits,
            [False] * len(self._order),
            self._order,
        )
        indices = self._small(torch.int32.itemsize * (len(self._order) + 1))
        self._sent.clear()  # indices are sent before sizes
        sizes = self._small(torch.int32.itemsize * len(buckets))
        self._make_buckets(buckets)
        del indices, sizes
        return True

    def _small(self, size: int) -> torch.Tensor:
        """Allocate bytes that carry numbers between ranks."""
        tensor = torch.empty(size, dtype=torch.uint8, device=self._parameters[0].device)
        self._name(tensor, Category.COMMUNICATION, "DDP bookkeeping")
        return tensor

    def _make_map_of_used(self) -> None:
        """Allocate the map of used parameters (Reducer::initialize_local_used_map)."""
        self._used = self._small(torch.int32.itemsize * len(self._parameters))

    def _make_buckets(self, indices: Sequence[Sequence[int]]) -> None:
        """Create the buckets after the old ones are freed, as in Reducer::initialize_buckets."""
        self._views.clear()
        self._buckets.clear()
        with torch.no_grad():
            for number, bucket in enumerate(indices):
                self._make_bucket(number, [(index, self._parameters[index]) for index in bucket])

    def _make_bucket(self, number: int, members: Sequence[tuple[int, torch.Tensor]]) -> None:
        first = members[0][1]
        count = sum(parameter.numel() for _, parameter in members)
        flat = torch.empty(count, dtype=first.dtype, device=first.device)
        kind = Category.GRADIENT if self._as_views else Category.COMMUNICATION
        self._name(flat, kind, f"DDP bucket {number}")
        start = 0
        self._buckets.append(FakeBucket(number, flat, self._views, dict(members)))
        for index, parameter in members:
            # A view has the strides of its parameter if that is dense (Reducer::initialize_bucket_views).
            strides = parameter.stride() if _is_dense(parameter) else torch.empty_like(parameter).stride()
            self._views[index] = flat.as_strided(parameter.shape, strides, start)
            start += parameter.numel()
            self._move_in(index)

    def _move_in(self, index: int) -> None:
        """Turn an existing gradient into a view of the new bucket, with `gradient_as_bucket_view`."""
        gradient = self._parameters[index].grad
        if self._as_views and gradient is not None:
            self._views[index].copy_(gradient)
            self._parameters[index].grad = self._views[index]

    def _ready(self, index: int, _: torch.Tensor) -> None:
        """Handle a gradient that was accumulated into its parameter."""
        if not self._expects or (self._static and not self._delayed):
            return
        if self._may_rebuild:
            self._order.append(index)
        torch.autograd.Variable._execution_engine.queue_callback(self._finished)
        self._take(index)

    @torch.no_grad()
    def _take(self, index: int) -> None:
        """Mark a gradient as ready (Reducer::mark_variable_ready_dense), and reduce full buckets in order."""
        self._copy(index)
        self._ready_indices.add(index)
        while self._reduced < len(self._buckets) and (
            self._buckets[self._reduced].members.keys() <= self._ready_indices
        ):
            self._reduce_next()

    def _copy(self, index: int) -> None:
        parameter, view, size = self._parameters[index], self._views[index], self._group.size()
        gradient = parameter.grad
        if gradient is None:
            return
        is_view = gradient.untyped_storage()._cdata == view.untyped_storage()._cdata
        if self._hook is not None:
            if not is_view:
                view.copy_(gradient)
        elif is_view:
            view.div_(size)
        else:
            torch.mul(gradient, 1.0 / size, out=view)
        if self._as_views:
            parameter.grad = view

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._reduced]
        bucket.last = self._reduced == len(self._buckets) - 1
        self._reduced += 1
        if self._hook is not None:
            with watched(self._send):
                self._hook(bucket).wait()

    def _send(self, tensors: list[torch.Tensor]) -> None:
        """Keep what a hook sends as NCCL does, and let go what it sent in the previous backward."""
        self._sent_before.clear()
        if _BEFORE_2_15 and tensors[0].device.type == "cuda":
            self._sent.append(tensors)

    @torch.no_grad()
    def _finished(self) -> None:
        """End a backward: the remaining buckets, whose parameters it did not all use, are reduced too."""
        while self._expects and self._reduced < len(self._buckets):
            self._reduce_next()
        self._expects = False

    def _delay_all_reduce(self) -> None:
        """End the first backward of a static graph (Reducer::delay_all_reduce)."""
        for index in range(len(self._parameters)):
            self._take(index)
        self._delayed = True
        self._finished()

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _set_static_graph(self) -> None:
        self._static = self._may_rebuild = True
        self._make_map_of_used()

    def __getattr__(self, name: str) -> Any:
        if name in _WITHOUT_MEMORY:
            return do_nothing
        raise _refusal(f"that calls Reducer.{name}", "Leave that feature out.")


_WITHOUT_MEMORY = frozenset(
    {
        "prepare_for_forward",
        "set_logger",
        "_set_ddp_runtime_logging_sample_rate",
        "_set_forward_pass_work_handle",
        "_check_reducer_finalized",
        "_set_optimizer_in_backward",
    }
)


class FakeBucket:
    """A stand-in for `torch.distributed.GradBucket`, the argument of communication hooks."""

    def __init__(
        self,
        number: int,
        flat: torch.Tensor,
        views: dict[int, torch.Tensor],
        members: dict[int, torch.Tensor],
    ) -> None:
        self.members = members
        self.last = False
        self._number, self._flat, self._views = number, flat, views

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._number

    def buffer(self) -> torch.Tensor:
        """Return the flat tensor with all its gradients, one after the other."""
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Copy another buffer into the bucket's own."""
        self._flat.copy_(buffer)

    def gradients(self) -> list[torch.Tensor]:
        """Return its gradients, as views of the buffer."""
        return [self._views[index] for index in self.members]

    def parameters(self) -> list[torch.Tensor]:
        """Return its parameters."""
        return list(self.members.values())

    def is_last(self) -> bool:
        """Return whether it is the last bucket to be reduced."""
        return self.last


class _Silent:
    """A stand-in for `torch.distributed.Logger`, which only records timings."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return do_nothing


def _is_dense(tensor: torch.Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _refuse_mixed_precision(*_: Any) -> None:
    """Refuse before DDP makes a stream, which builds for CUDA cannot do on a computer without a GPU."""
    raise _refusal("with mixed_precision", "Use autocast, or FSDP2's MixedPrecisionPolicy.")


def _refusal(clause: str, fix: str) -> MemPluginError:
    return MemPluginError(
        f"DistributedDataParallel {clause} cannot be estimated.", where="DistributedDataParallel", fix=fix
    )


def _exchange_shapes(group: Any, parameters: Sequence[torch.Tensor], *_: Any) -> None:
    """Allocate what verify_params_across_processes does on a GPU: counts of all ranks, and all shapes."""
    device = parameters[0].device
    if device.type == "cuda":
        ranks = group.size()
        counts = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(ranks + 1)]
        if _BEFORE_2_15:
            torch.empty(ranks, dtype=torch.int64, device=device)
        torch.empty(sum(2 * parameter.dim() for parameter in parameters), dtype=torch.int64, device=device)
        del counts
