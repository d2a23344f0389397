"""`DistributedDataParallel`: its buckets, modelled. The reducer is C++ and reads addresses that fakes lack.

Rules of torch/csrc/distributed/c10d/reducer.cpp (2.13): one flat buffer a bucket, for as long as the model
lives. The first backward has one bucket for each type and device; before the second forward they are made
anew in the order in which gradients came, of 1 MiB and then `bucket_cap_mb`. A gradient that is ready is
copied into its bucket, and with `gradient_as_bucket_view` becomes a view of it. All-reduce is in place, or
what a communication hook does with each bucket, in their order, when all of its gradients are there. With
`static_graph` the first backward is reduced when it is over, and buckets are made anew before the third
forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_mode import CountingFakeMode
from tb_memplugin.estimate.patches import Patches
from tb_memplugin.trace import Category

Name = Callable[[torch.Tensor, Category, str], None]
"""`name(tensor, category, label)` says what the memory behind a tensor is for."""


class DataParallel(Correction):
    """A reducer of ours in the place of torch's."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace `torch.distributed.Reducer` and what only talks to it."""
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
        patches.set(distributed, "_verify_param_shape_across_processes", _nothing)
        if self.target.device_type == "cuda":
            _let_hooks_be_of_a_gpu(patches, distributed.DistributedDataParallel)


def _let_hooks_be_of_a_gpu(patches: Patches, owner: Any) -> None:
    """Hooks in bfloat16 are refused where torch has no NCCL."""
    original = owner._check_comm_hook

    def check(model: Any, hook: Any) -> None:
        if not getattr(hook, "__name__", "").startswith("bf16_compress"):
            original(model, hook)

    patches.set(owner, "_check_comm_hook", check)


class FakeReducer:
    """The memory of `torch.distributed.Reducer`: the same arguments, in the same order, after `name`."""

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
        self._make_buckets(bucket_indices)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def prepare_for_forward(self) -> None:
        """Only counts iterations."""

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """The next backward is reduced."""
        self._expects, self._reduced = True, 0
        self._ready_indices.clear()

    def call_hook(self, state: Any, hook: Callable[[Any, FakeBucket], Any]) -> None:
        """Reduce each bucket by a hook of the program's."""
        self._hook = functools.partial(hook, state)

    def call_builtin_hook(self, kind: Any) -> None:
        """Reduce each bucket by one of torch's own, that are C++; in Python they do the same."""
        from torch._C._distributed_c10d import BuiltinCommHookType
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        compress = kind == BuiltinCommHookType.FP16_COMPRESS
        hook: Any = default_hooks.fp16_compress_hook if compress else default_hooks.allreduce_hook
        self._hook = functools.partial(hook, self._group)

    def _rebuild_buckets(self) -> bool:
        """Once, before the second forward: buckets in the order in which gradients became ready."""
        if not self._may_rebuild or not self._order:
            return False
        from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

        if len(self._order) != len(self._parameters):
            raise _refusal(
                f"whose first backward made {len(self._order)} gradients ready, of {len(self._parameters)}, "
                "fails in torch itself (Reducer::rebuild_buckets), and",
                "Give find_unused_parameters=True where some are not used. In a pipeline: more micro-batches "
                "than stages (and not GPipe), or stages that are told their input_args and output_args.",
            )
        self._may_rebuild = False
        found, _ = _compute_bucket_assignment_by_size(
            [self._parameters[index] for index in self._order],
            self._limits,
            [False] * len(self._order),
            self._order,
        )
        self._make_buckets(found)
        return True

    def _make_buckets(self, indices: Sequence[Sequence[int]]) -> None:
        """The old ones go first, as in Reducer::initialize_buckets."""
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
            # The strides of the parameter where it is dense: Reducer::initialize_bucket_views.
            strides = parameter.stride() if _is_dense(parameter) else torch.empty_like(parameter).stride()
            self._views[index] = flat.as_strided(parameter.shape, strides, start)
            start += parameter.numel()
            self._move_in(index)

    def _move_in(self, index: int) -> None:
        """A gradient that is there already becomes a view of the new bucket."""
        gradient = self._parameters[index].grad
        if self._as_views and gradient is not None:
            self._views[index].copy_(gradient)
            self._parameters[index].grad = self._views[index]

    def _ready(self, index: int, _: torch.Tensor) -> None:
        """A gradient was put into its parameter."""
        if not self._expects or (self._static and not self._delayed):
            return
        if self._may_rebuild:
            self._order.append(index)
        torch.autograd.Variable._execution_engine.queue_callback(self._finished)
        self._take(index)

    @torch.no_grad()
    def _take(self, index: int) -> None:
        """Reducer::mark_variable_ready_dense; then the buckets that are full, in their order."""
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
            self._hook(bucket).wait()

    @torch.no_grad()
    def _finished(self) -> None:
        """The backward is over: buckets of parameters that it did not use are reduced, too."""
        while self._expects and self._reduced < len(self._buckets):
            self._reduce_next()
        self._expects = False

    def _delay_all_reduce(self) -> None:
        """The first backward of a static graph is over (Reducer::delay_all_reduce)."""
        for index in range(len(self._parameters)):
            self._take(index)
        self._delayed = True
        self._finished()

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _set_static_graph(self) -> None:
        self._static = self._may_rebuild = True

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        raise _refusal("with mixed_precision", "Use autocast, or FSDP2's MixedPrecisionPolicy.")

    def __getattr__(self, name: str) -> Any:
        if name in _WITHOUT_MEMORY:
            return _nothing
        raise _refusal(f"that calls Reducer.{name}", "Leave that feature out.")


_WITHOUT_MEMORY = frozenset(
    {
        "set_logger",
        "_set_ddp_runtime_logging_sample_rate",
        "_set_forward_pass_work_handle",
        "_check_reducer_finalized",
        "_set_optimizer_in_backward",
    }
)


class FakeBucket:
    """What a communication hook gets: `torch.distributed.GradBucket`."""

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
        """Which of the buckets."""
        return self._number

    def buffer(self) -> torch.Tensor:
        """All of its gradients, one after the other."""
        return self._flat

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Another one in its place, until the backward is over."""
        self._flat.copy_(buffer)

    def gradients(self) -> list[torch.Tensor]:
        """Its gradients."""
        return [self._views[index] for index in self.members]

    def parameters(self) -> list[torch.Tensor]:
        """Its parameters."""
        return list(self.members.values())

    def is_last(self) -> bool:
        """Whether it is the last to be reduced."""
        return self.last


class _Silent:
    """Stands for `torch.distributed.Logger`, which only writes down timings."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _nothing


def _is_dense(tensor: torch.Tensor) -> bool:
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _refusal(what: str, fix: str) -> MemPluginError:
    return MemPluginError(
        f"DistributedDataParallel {what} cannot be estimated.", where="DistributedDataParallel", fix=fix
    )


def _nothing(*_: Any, **__: Any) -> None:
    return None
