"""Watch the calls of modules from outside: no module and no dictionary of hooks holds anything of ours.

torch and its libraries decide by a module's hooks: `nn.TransformerEncoderLayer` leaves its fast path,
`torch.compile` warns and traces other code, copies and pickles carry hooks along, `torch.jit.script` compiles
them; and Kineto knows `nn.Module.__call__` by its code. But every call of a module asks the class for
`_compiled_call_impl`, which `module.compile()` sets (torch/nn/modules/module.py, `_wrapped_call_impl`, in
torch 2.1 to 2.13). While anyone watches, the class answers with a function of ours. Nobody watches outside of
recorded windows, and then the class is as torch made it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from tb_memplugin.record import beside_compiler
from tb_memplugin.record.beside_compiler import skipped_by_dynamo
from tb_memplugin.record.guard import UNOWNED, Failed, call_all
from tb_memplugin.record.torch_private.modules import (
    COMPILED_CALL,
    FORWARD_HOOKS,
    HOOKS,
    IS_REPLICA,
    uncompiled_call_of,
)

Entered = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], object]
"""Called with a module and the arguments of its call, before the call."""

Left = Callable[[nn.Module, tuple[Any, ...], Any], object]
"""Called with a module, its positional arguments and its result, None if the call raised."""

_Watchers = tuple[tuple[Entered, Left, "ModuleCalls"], ...]

_of_module: dict[int, _Watchers] = {}
"""The watchers by `id(module)`."""
_of_replica: dict[int, _Watchers] = {}
"""The same by `id(module._forward_hooks)`, which `nn.DataParallel`'s replicas of a module share with it."""
_of_all: _Watchers = ()
_version = 0
"""How often watchers were added or removed."""
_open: list[ModuleCalls] = []
_slot: Any = None
"""What stands in the place of `nn.Module._compiled_call_impl`."""


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as `nn.Module.__call__` does, and tell its watchers.

    If a profile records stacks, each call here, of C functions too, is an event in the user's own profile.
    """
    call: Callable[..., Any] = uncompiled_call_of(module)
    version, watchers = _version, _NOBODY
    try:
        if not beside_compiler.is_known:  # it may have been loaded since the watch began
            beside_compiler.look()
        version, watchers = _version, _of_module.get(id(module)) or _general_watchers(module)
        if _slot is not _run:
            call = compiled_call(module) or call
    except BaseException as error:
        _fail_all(error)
    for entered, _, owner in watchers:
        try:
            entered(module, args, kwargs)
        except BaseException as error:
            owner.fail(error)
    if version != _version:
        watchers = _begun_within(watchers, module, args, kwargs)
        version = _version
    result = None
    try:
        result = call(*args, **kwargs)
    finally:
        if version != _version:  # who began to watch within the call is told of its end
            try:
                watchers = _of_module.get(id(module)) or _general_watchers(module)
            except BaseException as error:
                watchers = _NOBODY
                _fail_all(error)
        for _, left, owner in watchers[::-1]:
            try:
                left(module, args, result)
            except BaseException as error:
                owner.fail(error)
    return result


_NOBODY: _Watchers = ()


def _begun_within(
    told: _Watchers, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Watchers:
    """Tell those who began to watch as others were told of a call; return all watchers of it."""
    watchers: _Watchers = _NOBODY
    try:
        watchers = _of_module.get(id(module)) or _general_watchers(module)
    except BaseException as error:
        _fail_all(error)
    for entered, _, owner in [watcher for watcher in watchers if watcher not in told]:
        try:
            entered(module, args, kwargs)
        except BaseException as error:
            owner.fail(error)
    return watchers


def _fail_all(error: BaseException) -> None:
    """End every watch: this module itself failed."""
    call_all(*(partial(calls.fail, error) for calls in list(_open)))
    if not isinstance(error, Exception):
        raise error


class _Slot:
    """Tells the calls of modules that `module.compile()` compiled, too.

    These have a `_compiled_call_impl` of their own, which is used instead of the class's, unless the class
    has a descriptor like this. Setting and deleting the attribute does what it does without us.
    """

    def __get__(self, module: nn.Module | None, _: type | None = None) -> Any:
        return None if module is None else MethodType(_run, module)

    def __set__(self, module: nn.Module, value: object) -> None:
        module.__dict__[COMPILED_CALL] = value

    def __delete__(self, module: nn.Module) -> None:
        try:
            del module.__dict__[COMPILED_CALL]
        except KeyError:
            raise AttributeError(COMPILED_CALL) from None


def _general_watchers(module: nn.Module) -> _Watchers:
    """Return the watchers of all modules, and of a replica those of its module."""
    own = module.__dict__
    watchers = _of_replica.get(id(own.get(FORWARD_HOOKS)), ()) if own.get(IS_REPLICA) else ()
    return (*_of_all, *watchers)


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

        def gone(_: object) -> None:
            try:
                self._drop(key)
            except BaseException as error:
                self.fail(error)

        self._failed = failed
        with beside_compiler.lock:
            if not self.is_watching(module):
                self._watched[key] = weakref.ref(module, gone), functions, replicas
                _of_module[key] = (*_of_module.get(key, _of_all), functions)
                _of_replica[replicas] = (*_of_replica.get(replicas, ()), functions)
                self._begin(compiled=compiled_call(module) is not None, guarded=_is_inlined_by_call(module))

    def watch_all(self, entered: Entered, left: Left, failed: Failed = UNOWNED.end) -> None:
        """Call two functions around every call of any module, as `watch` does."""
        global _of_all
        self._failed = failed
        with beside_compiler.lock:
            self._all = entered, left, self
            _of_all = (*_of_all, self._all)
            for key, watchers in _of_module.items():
                _of_module[key] = (*watchers, self._all)
            self._begin(compiled=True, guarded=True)

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
        with beside_compiler.lock:
            for key in list(self._watched):
                self._drop(key)
            if self._all is not None:
                _of_all = tuple(watcher for watcher in _of_all if watcher is not self._all)
                for key in list(_of_module):
                    _remove(_of_module, key, self._all)
                self._all = None
            if self in _open:
                _open.remove(self)
                _patch.guarded = _patch.guarded and bool(_open)
                _changed(None if not _open else _slot)
            self._failed = None  # it may hold who holds this

    def fail(self, error: BaseException) -> None:
        """End the watch because one of its functions raised."""
        failed = self._failed
        call_all(self.stop)
        if failed is not None:
            failed("a module's call", error)
        elif not isinstance(error, Exception):
            raise error

    def _begin(self, *, compiled: bool, guarded: bool) -> None:
        _patch.guarded = _patch.guarded or guarded
        if self not in _open:
            _open.append(self)
        _changed(_Slot() if compiled and _slot in (None, _run) else _slot or _run)

    def _drop(self, key: int) -> None:
        with beside_compiler.lock:
            watched = self._watched.get(key)
            if watched is not None:
                _, functions, replicas = watched
                _remove(_of_module, key, functions)
                _remove(_of_replica, replicas, functions)
                self._watched.pop(key, None)  # last: after a failure, the next `stop` removes the rest
                _changed(_slot)


def _remove(watchers: dict[int, _Watchers], key: int, functions: tuple[Entered, Left, ModuleCalls]) -> None:
    kept = tuple(watcher for watcher in watchers.get(key, ()) if watcher is not functions)
    if kept:
        watchers[key] = kept
    else:
        watchers.pop(key, None)


def _changed(slot: Any) -> None:
    global _slot, _version
    _slot, _version = slot, _version + 1
    if slot is None:
        try:
            beside_compiler.remove(_patch)
        except BaseException:
            call_all(_patch.take_off)
            raise
    else:
        beside_compiler.add(_patch)


class _ClassPatch:
    """The change of `nn.Module`. What was compiled of modules with hooks has guards on it."""

    guarded = False

    def put_on(self) -> None:
        if vars(nn.Module).get(COMPILED_CALL, _slot) is not _slot:
            setattr(nn.Module, COMPILED_CALL, _slot)

    def take_off(self) -> None:
        if vars(nn.Module).get(COMPILED_CALL) is not None:
            setattr(nn.Module, COMPILED_CALL, None)


_patch = _ClassPatch()


def _is_inlined_by_call(module: nn.Module) -> bool:
    """Whether torch.compile traces a module's `__call__`, and not only its `forward`."""
    own = module.__dict__
    return "forward" in own or any(value for name, value in own.items() if name.endswith(HOOKS))


for _function in (
    _run,
    _Slot.__get__,
    compiled_call,
    _general_watchers,
    _begun_within,
    _ClassPatch.put_on,
    _ClassPatch.take_off,
):
    skipped_by_dynamo(_function)
