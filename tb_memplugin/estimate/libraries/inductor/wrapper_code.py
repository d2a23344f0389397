"""Run the Python code that Inductor writes for a compiled graph on fake tensors.

That code calls kernels, and allocates, reuses and deletes their buffers. Here it allocates fake tensors, and
its own kernels do nothing. Operators that Inductor leaves to PyTorch (convolutions, attention) run as always.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import do_nothing

_ALLOCATES = "empty_strided_"
_AT = "_at"
_GUARD = "torch.cuda._DeviceGuard"


class CompiledCodeError(MemPluginError):
    """Compiled code failed, although its trial run did not."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"torch.compile: compiled code failed in the estimate ({type(error).__name__}: "
            f"{str(error)[:200]}).",
            fix="Estimate without torch.compile: torch.compile(..., disable=True).",
        )


class FakeModule:
    """The code of one graph, to run on fake tensors.

    `module` is what Inductor expects: it has a function `call`, which must run inside the estimate's mode.

    Args:
        graph: the GraphLowering whose code it is.
    """

    def __init__(self, graph: Any, code: str, mode: CountingFakeMode) -> None:
        self._mode = mode
        self._in_training = not getattr(graph, "is_inference", False)
        self._inputs = graph.example_inputs or ()
        # By buffer: the `id()`s of the modules in which its operator was called, the innermost last.
        self._owners = _owners(graph)
        self.module = module = ModuleType("compiled_graph")
        module.__file__ = "compiled_graph"
        names = self._names()
        tree = ast.fix_missing_locations(_Rewritten(names, self._owners).visit(ast.parse(code)))
        vars(module).update(names)
        exec(compile(tree, module.__file__, "exec"), vars(module))
        for name, value in {**graph.constants, **getattr(graph, "torchbind_constants", {})}.items():
            setattr(module, name, value)
        self._call: Callable[[Any], Any] = module.call
        module.call = self._placed  # type: ignore[attr-defined]

    def run_on_samples(self) -> None:
        """Run the code once on inputs like those that it was compiled for."""
        self._call([_sample(value) for value in self._inputs])

    def _names(self) -> dict[str, Any]:
        """Return what stands for the functions that the code imports."""
        return {
            "AsyncCompile": _NoKernels,
            "extern_kernels": _Extern(self._mode),
            "empty_strided_cuda": self._allocate("cuda"),
            "empty_strided_cpu": self._allocate("cpu"),
            "empty_strided_cpu_pinned": self._allocate("cpu"),
            "reinterpret_tensor": _reinterpret,
            "assert_size_stride": do_nothing,
            "assert_alignment": do_nothing,
            "copy_if_misaligned": lambda tensor: tensor,
            "get_raw_stream": lambda _: 0,
            "start_graph": do_nothing,
            "end_graph": do_nothing,
            "_DeviceGuard": torch.cuda.device,
            _AT: self._at,
        }

    def _allocate(self, device: str) -> Callable[..., Tensor]:
        def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, kernel: str = "") -> Tensor:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
            block = self._mode.ledger.block_of(tensor.untyped_storage())
            if block is not None and kernel:
                block.made_by = kernel
            return tensor

        return empty

    def _at(self, buffer: str) -> None:
        """Say that the operator of a buffer runs now."""
        layers = self._mode.layers
        layers.run_kernel(layers.row_of_ids(self._owners.get(buffer, ())))

    def _placed(self, args: Any) -> Any:
        with self._mode.layers.running_kernels(training=self._in_training):
            try:
                out = self._call(args)
            except Exception as error:
                raise CompiledCodeError(error) from error
            self._mode.settle(self._mode.layers.scope())
            return out


class _NoKernels:
    """Stands for Inductor's AsyncCompile: every kernel does nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: _Kernel()

    wait = do_nothing


class _Kernel:
    run = __call__ = do_nothing


class _Extern:
    """Stands for Inductor's `extern_kernels`: PyTorch's own kernels, which may write into a given buffer."""

    def __init__(self, mode: CountingFakeMode) -> None:
        self._mode = mode

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from torch._inductor.select_algorithm import extern_kernels

        kernel: Callable[..., Any] = getattr(extern_kernels, name)
        packet = getattr(torch.ops.aten, name.removeprefix("bias_"), None)

        def run(*args: Any, out: Tensor | None = None, **options: Any) -> Any:
            if out is None:
                return kernel(*args, **options)
            if packet is not None and "out" in packet.overloads():
                self._mode.ran(packet.out, args, out)
            return out

        return run


class _Rewritten(ast.NodeTransformer):
    """Takes out imports of what `names` has, and says before each operator which buffer it makes."""

    def __init__(self, names: dict[str, Any], owners: dict[str, Any]) -> None:
        self._names, self._owners = names, owners

    def visit_Module(self, node: ast.Module) -> ast.Module:
        node.body = [self.visit(statement) for statement in node.body if not self._replaced(statement)]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = self._placed(node.body)
        return node

    def visit_With(self, node: ast.With) -> ast.With:
        for item in node.items:
            if ast.unparse(item.context_expr).startswith(_GUARD):
                call = item.context_expr
                assert isinstance(call, ast.Call)
                call.func = ast.Name("_DeviceGuard", ast.Load())
        node.body = self._placed(node.body)
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        node.body, node.orelse = self._placed(node.body), self._placed(node.orelse)
        return node

    def _replaced(self, statement: ast.stmt) -> bool:
        """Whether a statement of the module imports or names what is replaced, or imports Triton."""
        if isinstance(statement, ast.Import):
            return any(alias.name.partition(".")[0] == "triton" for alias in statement.names)
        if isinstance(statement, ast.ImportFrom):
            names = {alias.asname or alias.name for alias in statement.names}
            return (statement.module or "").startswith("triton") or bool(names & self._names.keys())
        return isinstance(statement, ast.Assign) and _target(statement) in self._names

    def _placed(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        users = _users(body)
        for number, statement in enumerate(body):
            buffer = _made_by(statement)
            if buffer in self._owners:
                say = ast.Call(ast.Name(_AT, ast.Load()), [ast.Constant(buffer)], [])
                out.append(ast.Expr(say))
            if isinstance(statement, ast.Assign) and _is_allocation(statement.value):
                statement.value.args.append(ast.Constant(users[number]))  # type: ignore[attr-defined]
            out.append(self.visit(statement))
        return out


def _owners(graph: Any) -> dict[str, tuple[int, ...]]:
    """Return the modules of each buffer of a graph, from what dynamo wrote down at each operator."""
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    owners: dict[str, tuple[int, ...]] = {}
    for name, buffer in graph.name_to_buffer.items():
        stacks = [
            (order.get(node, -1), stack)
            for node in buffer.get_origins()
            if (stack := node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))
        ]
        stack = max(stacks, key=lambda numbered: numbered[0])[1] if stacks else {}
        keys = [str(key).partition("@")[0] for key in stack]
        owners[name] = tuple(int(key) for key in keys if key.isdigit())
    return owners


def _sample(value: Any) -> Any:
    """Return an input of a graph with its likely sizes in place of symbols."""
    if not isinstance(value, Tensor):
        return _number(value)
    shape, strides = map(_number, value.shape), map(_number, value.stride())
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=value.dtype, device=value.device)


def _number(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat) else size


def _target(statement: ast.Assign) -> str:
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _made_by(statement: ast.stmt) -> str:
    """Return the buffer that a statement's call makes or writes into, "" for none."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
        return _target(statement)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        for keyword in statement.value.keywords:
            if keyword.arg == "out" and isinstance(keyword.value, ast.Name):
                return keyword.value.id
    return ""


def _is_allocation(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func).startswith(_ALLOCATES)


def _users(body: Sequence[ast.stmt]) -> dict[int, str]:
    """Return, for each statement that allocates, the name of the first later call that gets the buffer."""
    users: dict[int, str] = {}
    latest: dict[str, str] = {}
    for number in range(len(body) - 1, -1, -1):
        statement = body[number]
        if isinstance(statement, ast.Assign) and _is_allocation(statement.value):
            users[number] = latest.get(_target(statement), "")
        elif isinstance(call := getattr(statement, "value", None), ast.Call):
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            name = _name(ast.unparse(call.func))
            latest |= {
                node.id: name for arg in arguments for node in ast.walk(arg) if isinstance(node, ast.Name)
            }
    return users


def _name(function: str) -> str:
    """Return an operator's name for a function of the code: Triton's kernel, or `aten::mm`."""
    if function.startswith("extern_kernels."):
        return f"aten::{function.rpartition('.')[2].removeprefix('bias_')}"
    if function.startswith("torch.ops."):
        return "::".join(function.split(".")[2:4])
    return function.removesuffix(".run")


def _reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
