"""Advice: what would have made a request fit that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tb_memplugin.analysis.advice_rules.attention_scores import attention_scores
from tb_memplugin.analysis.advice_rules.checkpointing import checkpointing
from tb_memplugin.analysis.advice_rules.kept_gradients import kept_gradients
from tb_memplugin.analysis.advice_rules.loss_logits import loss_logits
from tb_memplugin.analysis.advice_rules.optimizer_state import optimizer_state
from tb_memplugin.analysis.advice_rules.parameter_copies import parameter_copies
from tb_memplugin.analysis.advice_rules.summed_losses import summed_losses
from tb_memplugin.analysis.advice_rules.uneven_devices import uneven_devices
from tb_memplugin.analysis.advice_rules.unused_graph import unused_graph
from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, Result, Where, share
from tb_memplugin.analysis.oom import OomReport, oom_report
from tb_memplugin.analysis.units import size_text
from tb_memplugin.errors import MemPluginError
from tb_memplugin.simulator.allocator_settings import MIB, AllocatorSettings, recorded_settings
from tb_memplugin.simulator.replay import replay
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.kinds import NOT_DATA

REMEDIES: dict[str, Callable[[Judged], Result]] = {
    "no graph of forwards that are not trained": unused_graph,
    "one backward for each loss": summed_losses,
    "divide the batch evenly over the devices": uneven_devices,
    "recompute activations in backward": checkpointing,
    "fused attention": attention_scores,
    "the loss over parts of the tokens": loss_logits,
    "free gradients before forward": kept_gradients,
    "no second copy of the parameters": parameter_copies,
    "8-bit optimizer state": optimizer_state,
}
"""What other rules find, and what each saves."""

MOST_EVENTS = 200_000
"""Longer recordings are not simulated: that takes a second per 100,000 events, for each setting."""

ENOUGH, NOT_ENOUGH = "enough", "not enough"


def failed_request(judged: Judged) -> Result:
    """Explain a device's last failed request, and how far each change would have reached.

    The finding's bytes are what is missing: the request minus what was free on the device and in segments
    that it could use; with fragmentation, what is missing in one piece: in the largest stretch that it could
    use, or on the device for a segment of its own, whichever is less. If a limit on the process refused the
    request, as far as the limit is not known: at most a segment for it. A change is
    enough if it saves that much at the peak and the request failed at the peak. Settings and a larger
    device are simulated with all requests up to this one.
    """
    trace, device = judged.trace, judged.device
    failed = [row for row, oom in enumerate(trace.ooms) if trace.events.device[oom.event] == device]
    if not failed:
        return Fine("No request failed while it was recorded.")
    report = oom_report(trace, failed[-1])
    missing = _missing(report)
    name = judged.name
    changes = [*_settings(trace, device, report), *_other_rules(judged, report, missing)]
    changes.append(_smaller_batch(trace, device, report, missing))
    changes.sort(key=lambda row: (row.detail.startswith(NOT_ENOUGH), -row.bytes))
    limited, free = report.cause == "limit", size_text(report.free_bytes or 0)
    failed_on = f"A request for {size_text(report.requested_bytes)} failed on {name}"
    in_one_piece = " in one piece" if report.cause == "fragmented" else ""
    return Finding(
        kind="failed_request",
        level="problem",
        device=name,
        step=trace.step_at(report.event).number,
        title=f"{failed_on}, which had {free} free: a limit on the process refused it."
        if limited
        else f"{failed_on}.",
        subject=name,
        bytes=missing,
        measure="missing at most" if limited else f"missing{in_one_piece}",
        of_bytes=report.active_bytes + report.requested_bytes,
        evidence=(Evidence("requested", report.requested_bytes, report.why, False), *changes),
        where=Where(
            "allocator", (("step", str(trace.step_at(report.event).number)), ("event", str(report.event)))
        ),
        what_to_do=_what_to_do(changes),
    )


def _missing(report: OomReport) -> int:
    if report.cause == "limit":
        return report.new_segment_bytes
    if report.cause == "fragmented":
        in_a_segment = report.new_segment_bytes - _outside(report)
        return min(report.requested_bytes - (report.largest_usable_bytes or 0), in_a_segment)
    return max(report.requested_bytes - _outside(report) - (report.usable_free_bytes or 0), 0)


def _outside(report: OomReport) -> int:
    """Return what the process could still have taken from the device; with a limit, surely nothing."""
    return 0 if report.cause == "limit" else report.free_bytes or 0


def _settings(trace: MemoryTrace, device: int, report: OomReport) -> Iterator[Evidence]:
    """Simulate the recorded requests with other settings, and with the memory that the request needs."""
    if report.reserved_bytes is None or report.free_bytes is None or len(trace.events) > MOST_EVENTS:
        return
    capacity = report.reserved_bytes + _outside(report)
    try:
        recorded = recorded_settings(trace)
        if not recorded.expandable_segments:
            yield _simulated(trace, device, report, replace(recorded, expandable_segments=True), capacity)
        if recorded.max_split_bytes > 512 * MIB and not recorded.expandable_segments:
            yield _simulated(trace, device, report, replace(recorded, max_split_bytes=512 * MIB), capacity)
        yield (
            _higher_limit(report)
            if report.cause == "limit"
            else _larger_device(trace, device, report, recorded, capacity)
        )
    except MemPluginError:
        return


def _higher_limit(report: OomReport) -> Evidence:
    detail = f"{ENOUGH}: the device had {size_text(report.free_bytes or 0)} free"
    return Evidence(
        "a higher limit (torch.cuda.set_per_process_memory_fraction)", report.new_segment_bytes, detail, False
    )


def _larger_device(
    trace: MemoryTrace, device: int, report: OomReport, settings: AllocatorSettings, capacity: int
) -> Evidence:
    """Simulate a device with what is missing in all, in one piece, and at last one without a limit."""
    in_one_piece = report.requested_bytes - (report.free_bytes or 0)
    for least in (_missing(report), in_one_piece):
        more = -(-least // settings.large_segment_bytes) * settings.large_segment_bytes
        if report.event in replay(trace, device, settings, capacity + more, recorded=False).rescued:
            break
    else:
        result = replay(trace, device, settings, capacity=None, recorded=False)
        more = max(int(result.reserved[report.event + 1]) - capacity, 0)
    detail = f"{ENOUGH}: simulated, with {size_text(capacity + more)} instead of {size_text(capacity)}"
    return Evidence("a device with more memory", more, detail, False)


def _simulated(
    trace: MemoryTrace, device: int, report: OomReport, settings: AllocatorSettings, capacity: int
) -> Evidence:
    result = replay(trace, device, settings, capacity, recorded=False)
    fits = report.event in result.rescued
    failure = result.failure
    at = result.end - 1 if failure is not None and failure.event < report.event else report.event
    reserved = int(result.reserved[min(at, result.end - 1) + 1])
    detail = f"{ENOUGH if fits else NOT_ENOUGH}: simulated, the request {'fits' if fits else 'fails too'}"
    saved = max(capacity - reserved, 0)
    return Evidence(settings.conf, saved, f"{detail}, with {size_text(saved)} of the device left", False)


def _other_rules(judged: Judged, report: OomReport, missing: int) -> Iterator[Evidence]:
    at_peak = judged.step.peak_bytes == report.active_bytes
    for what, rule in REMEDIES.items():
        result = judged.result(rule)
        if isinstance(result, Finding):
            how = ENOUGH if result.bytes >= missing else NOT_ENOUGH
            moment = "" if at_peak else ", but the request did not fail at the peak"
            yield Evidence(what, result.bytes, f"{how}: {result.measure}{moment}", False)


def _smaller_batch(trace: MemoryTrace, device: int, report: OomReport, missing: int) -> Evidence:
    """Return by how much what grows with the batch must shrink."""
    blocks = trace.allocations
    alive = blocks.alive_at(report.event, device)
    fixed = np.isin(blocks.category[alive], NOT_DATA)
    data = int(blocks.bytes[alive[~fixed & (blocks.born[alive] >= 0)]].sum()) + report.requested_bytes
    return Evidence(
        f"a batch smaller by {share(missing, data)}",
        missing,
        f"{ENOUGH}, if all {size_text(data)} of data and of the request shrink with it",
        False,
    )


def _what_to_do(changes: list[Evidence]) -> str:
    enough = [row.what for row in changes if row.detail.startswith(ENOUGH)]
    whose = "for this request, if not for those after it"
    return f"Each of these alone would have been enough {whose}: {'; '.join(enough)}."
