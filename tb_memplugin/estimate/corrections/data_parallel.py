"""`DistributedDataParallel`: its buckets, modelled. The reducer is C++ and reads addresses that fakes lack.

Rules of torch/csrc/distributed/c10d/reducer.cpp (2.13): one flat buffer a bucket, for as long as the model
lives. The first backward has one bucket for each type and device; before the second forward they are made
anew in the order in which gradients came, of 1 MiB and then `bucket_cap_mb`. A gradient that is ready is
copied into its bucket, and with `gradient_as_bucket_view` becomes a view of it. All-reduce is in place.
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
        patches.set(dist, "_register_comm_hook", _refuse_hook)
        patches.set(dist, "_register_builtin_comm_hook", _refuse_hook)
        patches.set(distributed, "_verify_param_shape_across_processes", _nothing)


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
    ) -> None:
        if any(expect_sparse_gradients):
            raise _refusal("with sparse gradients", "Use nn.Embedding(sparse=False).")
        if batched_grad_copy:
            raise _refusal("with batched_grad_copy=True", "Leave it out.")
        self._name = name
        self._parameters = list(parameters)
        self._limits = list(limits_for_rebuilding) or [first_bucket_bytes_cap, bucket_bytes_cap]
        self._as_views = gradient_as_bucket_view
        self._world_size = process_group.size()
        self._may_rebuild = not find_unused_parameters
        self._order: list[int] = []
        self._expects = False
        self._views: dict[int, torch.Tensor] = {}
        self._make_buckets(bucket_indices)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, index))
            for index, parameter in enumerate(self._parameters)
        ]

    def prepare_for_forward(self) -> None:
        """Only counts iterations."""

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """The next backward is reduced."""
        self._expects = True

    def _rebuild_buckets(self) -> bool:
        """Once, before the second forward: buckets in the order in which gradients became ready."""
        if not self._may_rebuild or not self._order:
            return False
        from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

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

    @torch.no_grad()
    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient was put into its parameter: Reducer::mark_variable_ready_dense."""
        if not self._expects:
            return
        if self._may_rebuild:
            self._order.append(index)
        torch.autograd.Variable._execution_engine.queue_callback(self._finished)
        gradient, view = parameter.grad, self._views[index]
        if gradient is None:
            return
        if gradient.untyped_storage()._cdata == view.untyped_storage()._cdata:
            view.div_(self._world_size)
            return
        torch.mul(gradient, 1.0 / self._world_size, out=view)
        if self._as_views:
            parameter.grad = view

    def _finished(self) -> None:
        self._expects = False

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _set_static_graph(self) -> None:
        raise _refusal("with static_graph=True", "Leave it out: without it the buckets are the same.")

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


def _refuse_hook(*_: Any) -> None:
    raise _refusal("with a communication hook", "Leave the hook out; what it allocates is its own matter.")


def _nothing(*_: Any, **__: Any) -> None:
    return None
