"""Choose the plan that PyTorch would run, and say how much workspace it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tb_memplugin.estimate.libraries.cudnn.header import Descriptor, HeurMode, NumericalNote
from tb_memplugin.estimate.libraries.cudnn.library import CudnnError, Descriptors


def device_descriptor(descriptors: Descriptors, description: str) -> int:
    """Return the descriptor of a described device (`device.described`)."""
    return descriptors.make(Descriptor.DEVICEPROP, DEVICEPROP_JSON_REPRESENTATION=description.encode())


def first_workspace(
    descriptors: Descriptors,
    device: int,
    operations: Sequence[int],
    modes: Iterable[HeurMode],
    unwanted: frozenset[NumericalNote] = frozenset(),
) -> int:
    """Return the workspace's bytes of the first plan for a graph of operations that cuDNN can make.

    Args:
        descriptors: makes descriptors.
        device: the descriptor of the device.
        operations: finalized descriptors of the graph's operations.
        modes: the heuristics to ask, one after the other.
        unwanted: engines with one of these notes are passed over.

    Raises:
        CudnnError: there is no plan.
    """
    graph = descriptors.make(Descriptor.OPERATIONGRAPH, OPERATIONGRAPH_OPS=operations)
    refusal = "cuDNN has no plan"
    for mode in modes:
        try:
            heuristics = descriptors.make(
                Descriptor.ENGINEHEUR,
                ENGINEHEUR_OPERATION_GRAPH=graph,
                ENGINEHEUR_MODE=mode,
                ENGINEHEUR_DEVICEPROP=device,
            )
            configs = descriptors.descriptors(heuristics, "ENGINEHEUR_RESULTS", Descriptor.ENGINECFG)
        except CudnnError as error:
            refusal = str(error)
            continue
        for config in configs:
            if unwanted and unwanted & _notes(descriptors, config):
                continue
            try:
                plan = descriptors.make(
                    Descriptor.EXECUTION_PLAN,
                    EXECUTION_PLAN_ENGINE_CONFIG=config,
                    EXECUTION_PLAN_DEVICEPROP=device,
                )
                return descriptors.numbers(plan, "EXECUTION_PLAN_WORKSPACE_SIZE")[0]
            except CudnnError as error:
                refusal = str(error)
    raise CudnnError(refusal)


def _notes(descriptors: Descriptors, config: int) -> frozenset[NumericalNote]:
    """Return what cuDNN notes on the numerics of an engine's configuration."""
    (engine,) = descriptors.descriptors(config, "ENGINECFG_ENGINE", Descriptor.ENGINE)
    numbers = descriptors.numbers(engine, "ENGINE_NUMERICAL_NOTE", NumericalNote.TYPE_COUNT)
    return frozenset(NumericalNote(number) for number in numbers if number in set(NumericalNote))
