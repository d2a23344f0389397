"""Watch the calls of modules from outside: no module and no dictionary of hooks holds anything of ours.

torch and its libraries decide by a module's hooks: `nn.TransformerEncoderLayer` leaves its fast path,
`torch.compile` warns and traces other code, copies and pickles carry hooks along, `torch.jit.script` compiles
them; and Kineto knows `nn.Module.__call__` by its code. But every call of a module reads `_call_impl` of the
class (torch/nn/modules/module.py, `_wrapped_call_impl`, in torch 2.1 to 2.13). While anyone watches, what it
reads is an object that C code calls, and that dies when the call has ended. So no frame of ours is among the
callers of a module: in tracebacks, or where `warnings.warn` counts them. Nobody watches outside of recorded
windows, and then the class is as torch made it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from tb_memplugin.record import beside_compiler
from tb_memplugin.record.beside_compiler import skipped_by_dynamo
from tb_memplugin.record.guard import UNOWNED, Failed, call_all, end_late, entry, interrupt_later, on_free
from tb_memplugin.record.torch_private.modules import (
    CALL,
    CALLER,
    COMPILED_CALL,
    FORWARD_HOOKS,
    HOOKS,
    IS_REPLICA,
)

Entered = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], object]
"""Called with a module and the arguments of its call, before the call. Returns True if `Left` needs
the result: then a frame of ours is among the callers.
"""

Left = Callable[[nn.Module, tuple[Any, ...], Any], object]
"""Called with a module, its positional arguments and its result: None if the call raised, or no result was
asked for.
"""

_WHERE = "a module's call"

_Watchers = tuple[tuple[Entered, Left, "ModuleCalls"], ...]

_of_module: dict[int, _Watchers] = {}
"""The watchers by `id(module)`."""
_of_replica: dict[int, _Watchers] = {}
"""The same by `id(module._forward_hooks)`, which `nn.DataParallel`'s replicas of a module share with it."""
_NOBODY: _Watchers = ()
_of_all = _NOBODY
_version = 0
"""How often watchers were added or removed."""
_open: list[ModuleCalls] = []


class _Call(partial[Any]):
    """The call of a watched module. Who makes it holds it alone, so it is freed when the call has ended."""

    __slots__ = ("watch",)

    watch: Generator[_Call, None, None]
    """What `_begin` returned. It is freed with the call, and goes on then."""


def _begin(
    module: nn.Module,
    watchers: _Watchers,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: Callable[..., Any],
    first: nn.Module | None = None,
) -> Generator[_Call, None, None]:
    """Tell the watchers that a module is called, yield what makes the call, and tell them of its end.

    If a profile records stacks, each call here, of C functions too, is an event in the user's own profile.
    """
    version, needs_result, notified, pending = _version, False, _NOBODY, watchers
    while pending:
        for entered, _, owner in pending:
            try:
                if entered(module, args, kwargs) is True:
                    needs_result = True
            except BaseException as error:
                owner.fail(_WHERE, error)
        if version == _version:
            break
        notified = (*notified, *pending)  # others began to watch just now
        version, watchers = _version, _watchers_of(module)
        pending = tuple(watcher for watcher in watchers if watcher not in notified)
    results: list[Any] = []
    parts = (_append_result, results, call) if needs_result else (call,)
    try:
        try:  # noqa: SIM105  # `suppress` would be called before what is ours
            yield _Call(*parts) if first is None else _Call(*parts, first)
        except GeneratorExit:  # the call has ended
            pass
        if version != _version:  # who began to watch within the call is told of its end
            watchers = _watchers_of(module)
        for _, left, owner in reversed(watchers):
            try:
                left(module, args, results[0] if results else None)
            except BaseException as error:
                owner.fail(_WHERE, error)
    except BaseException as error:
        try:
            _fail_all(_WHERE, error)
        except BaseException as ending:
            _interrupt = interrupt_later(ending)  # freed with this frame


def _append_result(results: list[Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = call(*args, **kwargs)
    results.append(result)
    return result


def _fail_all(where: str, error: BaseException) -> None:
    """End every watch: this module itself failed."""
    call_all(*(partial(calls.fail, where, error) for calls in list(_open)))
    if not isinstance(error, Exception):
        raise error


def _call_of(slot: _CallSlot, module: nn.Module | None, _: type | None = None) -> Any:
    if module is None:
        return slot.original
    caller = sys._getframe(2)
    if caller.f_code is CALLER:
        if beside_compiler.is_known and IS_REPLICA not in module.__dict__:
            watchers = _of_module.get(id(module), _of_all)  # without a call, which each module would cost
        else:
            watchers = _watchers_of(module)
        if watchers:
            arguments = caller.f_locals
            watch = _begin(module, watchers, arguments["args"], arguments["kwargs"], slot.original, module)
            for call in watch:  # unlike `next`, not an event in the user's own profile
                call.watch = watch
                return call
    return MethodType(slot.original, module)


def _original_of(slot: _CallSlot, module: nn.Module | None, _: type | None = None) -> Any:
    return slot.original if module is None else MethodType(slot.original, module)


class _CallSlot:
    """Stands in the place of `nn.Module._call_impl`; who is not `nn.Module.__call__` reads the original."""

    original: Any = None
    __get__ = entry(_call_of, _fail_all, _WHERE, _original_of)


def _compiled_call_of(_: _CompiledSlot, module: nn.Module | None, __: type | None = None) -> Any:
    if module is not None and sys._getframe(2).f_code is CALLER and _has_own_call(module):
        return MethodType(_run, module)
    return None if module is None else module.__dict__.get(COMPILED_CALL)


def _original_compiled_of(_: _CompiledSlot, module: nn.Module | None, *__: object) -> Any:
    return None if module is None else module.__dict__.get(COMPILED_CALL)


class _CompiledSlot:
    """Tells the calls of modules that `module.compile()` compiled, or whose class has its own `_call_impl`.

    The first have a `_compiled_call_impl` of their own, which is used instead of the class's, unless the
    class has a descriptor like this. Setting and deleting the attribute does what it does without us.
    """

    __get__ = entry(_compiled_call_of, _fail_all, _WHERE, _original_compiled_of)

    def __set__(self, module: nn.Module, value: object) -> None:
        module.__dict__[COMPILED_CALL] = value

    def __delete__(self, module: nn.Module) -> None:
        try:
            del module.__dict__[COMPILED_CALL]
        except KeyError:
            raise AttributeError(COMPILED_CALL) from None


def _begin_own(module: nn.Module, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    call = compiled_call(module) or getattr(module, CALL)
    watch = _begin(module, _watchers_of(module), args, kwargs, call)
    begun = next(watch)
    begun.watch = watch
    return begun


def _own_call(module: nn.Module, *_: object) -> Any:
    return module.__dict__.get(COMPILED_CALL) or getattr(module, CALL)


_run = entry(_begin_own, _fail_all, _WHERE, _own_call, calls_after=1)


def _has_own_call(module: nn.Module) -> bool:
    return compiled_call(module) is not None or getattr(type(module), CALL, None) is not getattr(
        nn.Module, CALL, None
    )


def _watchers_of(module: nn.Module) -> _Watchers:
    """Return who watches this module, or all modules, or the module that this is a replica of."""
    if not beside_compiler.is_known:  # it may have been loaded since the watch began
        beside_compiler.look()
    watchers = _of_module.get(id(module))
    if watchers is None:
        own = module.__dict__
        replica = _of_replica.get(id(own.get(FORWARD_HOOKS)), ()) if own.get(IS_REPLICA) else ()
        watchers = (*_of_all, *replica)
    return watchers


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return what `module.compile()` made, None for a module that is not compiled in this way."""
    compiled: Callable[..., Any] | None = module.__dict__.get(COMPILED_CALL)
    return compiled


class ModuleCalls:
    """Tells functions of the calls of modules, on every thread, from the first `watch` until `stop`.

    A call that began before is told when it ends, one that ends after `stop` is not. Who begins to watch as
    another watcher is told that a call begins, is told so, too. Calls are told whether the module runs as
    Python, compiled or scripted code; within compiled or scripted code no Python call happens, so modules
    there are not told. A replica that `nn.DataParallel` makes of a watched module counts
    as that module. Modules are held weakly.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[weakref.ref[nn.Module], tuple[Entered, Left, ModuleCalls], int]] = {}
        self._all: tuple[Entered, Left, ModuleCalls] | None = None
        self._failed: Failed | None = None

    def watch(self, module: nn.Module, entered: Entered, left: Left, failed: Failed = UNOWNED.end) -> None:
        """Call two functions around every call of a module, within those of earlier watchers.

        What they raise does not reach the call: it stops this object, and `failed` is called.
        """
        key, replicas = id(module), id(module.__dict__.get(FORWARD_HOOKS))
        functions = entered, left, self

        gone = on_free(lambda: self._drop(key), self.fail, _WHERE)
        self._failed = failed
        with beside_compiler.lock:
            if not self.is_watching(module):
                self._begin(own_call=_has_own_call(module), guarded=_is_inlined_by_call(module))
                self._watched[key] = weakref.ref(module, gone), functions, replicas
                _of_module[key] = (*_of_module.get(key, _of_all), functions)
                _of_replica[replicas] = (*_of_replica.get(replicas, ()), functions)

    def watch_all(self, entered: Entered, left: Left, failed: Failed = UNOWNED.end) -> None:
        """Call two functions around every call of any module, as `watch` does."""
        global _of_all
        self._failed = failed
        with beside_compiler.lock:
            self._begin(own_call=True, guarded=True)
            self._all = entered, left, self
            _of_all = (*_of_all, self._all)
            for key, watchers in _of_module.items():
                _of_module[key] = (*watchers, self._all)

    def is_watching(self, module: nn.Module) -> bool:
        """Whether the calls of this module are told to functions given to this object."""
        return id(module) in self._watched

    @property
    def watched(self) -> list[int]:
        """The ids of the watched modules."""
        return list(self._watched)

    def stop(self) -> None:
        """Stop watching. Safe to call at any time, and twice."""
        global _of_all
        end_late()
        with beside_compiler.lock:
            if self in _open:
                _open.remove(self)
            try:
                for key in list(self._watched):
                    self._drop(key)
                if self._all is not None:
                    _of_all = tuple(watcher for watcher in _of_all if watcher is not self._all)
                    for key in list(_of_module):
                        _remove(_of_module, key, self._all)
                    self._all = None
            finally:
                _changed()
            self._failed = None  # it may hold who holds this

    def fail(self, where: str, error: BaseException) -> None:
        """End the watch because one of its functions raised."""
        failed = self._failed
        call_all(self.stop)
        if failed is not None:
            failed(where, error)
        elif not isinstance(error, Exception):
            raise error

    def _begin(self, *, own_call: bool, guarded: bool) -> None:
        _patch.guarded = _patch.guarded or guarded
        _patch.has_compiled_slot = _patch.has_compiled_slot or own_call
        if self not in _open:
            _open.append(self)
        _changed()

    def _drop(self, key: int) -> None:
        with beside_compiler.lock:
            watched = self._watched.get(key)
            if watched is not None:
                _, functions, replicas = watched
                _remove(_of_module, key, functions)
                _remove(_of_replica, replicas, functions)
                self._watched.pop(key, None)  # last: after a failure, the next `stop` removes the rest


def _remove(watchers: dict[int, _Watchers], key: int, functions: tuple[Entered, Left, ModuleCalls]) -> None:
    kept = tuple(watcher for watcher in watchers.get(key, ()) if watcher is not functions)
    if kept:
        watchers[key] = kept
    else:
        watchers.pop(key, None)


def _changed() -> None:
    global _version
    _version += 1
    if _open:
        beside_compiler.add(_patch)
    else:
        _of_module.clear()
        _of_replica.clear()
        _patch.guarded = _patch.has_compiled_slot = False
        call_all(partial(beside_compiler.remove, _patch), _patch.take_off)
        slots = (CALL, _call_slot, _call_slot.original), (COMPILED_CALL, _compiled_slot, None)
        for name, slot, original in slots:  # where `take_off` failed each time
            if vars(nn.Module).get(name) is slot:
                setattr(nn.Module, name, original)


_call_slot, _compiled_slot = _CallSlot(), _CompiledSlot()


class _ClassPatch:
    """The change of `nn.Module`. What was compiled of modules with hooks has guards on it."""

    guarded = False
    has_compiled_slot = False
    failed = staticmethod(_fail_all)

    @property
    def is_wanted(self) -> bool:
        return bool(_open)

    def put_on(self) -> None:
        own = vars(nn.Module)
        if own.get(CALL, _call_slot) is not _call_slot:
            _call_slot.original = own[CALL]
            setattr(nn.Module, CALL, _call_slot)
        if self.has_compiled_slot and own.get(COMPILED_CALL, _compiled_slot) is not _compiled_slot:
            setattr(nn.Module, COMPILED_CALL, _compiled_slot)

    def take_off(self) -> None:
        own = vars(nn.Module)
        if own.get(CALL) is _call_slot:
            setattr(nn.Module, CALL, _call_slot.original)
        if own.get(COMPILED_CALL) is _compiled_slot:
            setattr(nn.Module, COMPILED_CALL, None)


_patch = _ClassPatch()


def _is_inlined_by_call(module: nn.Module) -> bool:
    """Whether torch.compile traces a module's `__call__`, and not only its `forward`."""
    own = module.__dict__
    return "forward" in own or any(value for name, value in own.items() if name.endswith(HOOKS))


for _function in (
    _begin,
    _append_result,
    _begin_own,
    _own_call,
    _has_own_call,
    _watchers_of,
    _call_of,
    _compiled_call_of,
    compiled_call,
    _ClassPatch.put_on,
    _ClassPatch.take_off,
):
    skipped_by_dynamo(_function)
