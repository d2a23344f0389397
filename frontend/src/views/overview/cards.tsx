import type { ComponentChildren } from "preact";
import { STEP_NOT_ENDED } from "../../api/contract";
import type { StepAnswer, StepStats } from "../../api/types";
import { alone, base, isAlone, picked, selection } from "../../state/app";
import { exactBytes, percent, type Unit, unitFor, withUnit } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import type { RoutePatch } from "../../state/route";
import { sideName } from "../../state/sentences";
import { Bytes, Delta } from "../amount";
import { RouteLink } from "../route_link";

/** The five numbers of a step. Each leads to where it comes from. */
export function Cards({ answer }: { answer: StepAnswer }) {
  const { stats } = answer;
  const unit = unitFor(stats.peak_bytes);
  return (
    <div class="cards">
      <Card
        id="peak"
        label="Peak allocated"
        to={{ view: "timeline", t: String(stats.peak_time_ns) }}
        value={<Bytes bytes={stats.peak_bytes} unit={unit} named />}
      >
        <Against answer={answer} unit={unit} />
      </Card>
      {stats.peak_reserved_bytes === null ? (
        <WindowPeak stats={stats} unit={unit} profiler={PROFILERS.includes(answer.source.kind)} />
      ) : (
        <Reserved stats={stats} reserved={stats.peak_reserved_bytes} unit={unit} />
      )}
      <Left answer={answer} unit={unit} />
      <Card
        id="allocations"
        label="Allocations"
        to={{ view: "modules", sort: "allocations" }}
        value={grouped(stats.allocations)}
      >
        <span title={exactBytes(stats.allocated_bytes)}>{withUnit(stats.allocated_bytes)} in total</span>
      </Card>
      {stats.capacity_bytes ? (
        <Card
          id="capacity"
          label="Of the device"
          to={{ view: "timeline" }}
          value={percent(stats.peak_bytes, stats.capacity_bytes)}
        >
          <span title={exactBytes(stats.capacity_bytes)}>of {withUnit(stats.capacity_bytes)}</span>
        </Card>
      ) : null}
      <Process />
    </div>
  );
}

/** The process of the worker, which holds more than tensors, and of which all steps were watched. */
function Process() {
  const { process, steps } = selection.value!;
  if (!process) return null;
  const { highest_bytes, highest_step, first, last } = process;
  const full = steps.some(({ step }) => step === highest_step);
  return (
    <Card
      id="process"
      label="Process, resident"
      to={{ device: "process", step: String(highest_step) }}
      value={<Bytes bytes={highest_bytes} unit={unitFor(highest_bytes)} named />}
    >
      in step {highest_step}, the highest of {first} to {last}
      {!full && "; not recorded in full"}
    </Card>
  );
}

function Reserved({ stats, reserved, unit }: { stats: StepStats; reserved: number; unit: Unit }) {
  const own = reserved >= 1000 * unit.size ? unitFor(reserved) : unit;
  return (
    <Card id="reserved" label="Reserved" to={{ view: "timeline" }} value={<Bytes bytes={reserved} unit={own} named />}>
      {percent(reserved - stats.peak_bytes, reserved)} of it unused at the peak
    </Card>
  );
}

const PROFILERS = ["torch.profiler", "kineto"];

/** A profiler counts from nothing when its window begins, so its highest is below the peak by what was there. */
function WindowPeak({ stats, unit, profiler }: { stats: StepStats; unit: Unit; profiler: boolean }) {
  const counts = profiler ? "the profiler counts from 0; " : "";
  return (
    <Card
      id="window-peak"
      label="Allocated while recording"
      to={{ view: "timeline" }}
      value={<Bytes bytes={stats.window_peak_bytes} unit={unit} named />}
    >
      <span title={`${counts}${exactBytes(stats.start_bytes)} were there when it began`}>
        highest at one time, not counting what was there before
      </span>
    </Card>
  );
}

/** What the step leaves behind, against what the first one left; of the first itself, against what it found. */
function Left({ answer, unit }: { answer: StepAnswer; unit: Unit }) {
  const { stats, first_end: first, notes } = answer;
  const growth = stats.end_bytes - (first ? first.end_bytes : stats.start_bytes);
  const since = first ? `since step ${first.step}` : "since recording began";
  const { failed, window } = selection.value!;
  const stopped = answer.step === window.steps.at(-1)?.step && notes.some(({ code }) => code === STEP_NOT_ENDED);
  return (
    <Card
      id="left"
      label={failed ? "Alive at the failure" : stopped ? "Alive when it stopped" : alone.value ? "Left at the end" : "Left after the step"}
      to={{ view: "timeline", t: String(stats.step_end_ns) }}
      value={<Bytes bytes={stats.end_bytes} unit={unit} named />}
    >
      {failed || stopped ? (
        "the step did not end"
      ) : growth === 0 ? (
        <span class="shrunk">no growth {since}</span>
      ) : (
        <>
          <Delta bytes={growth} unit={unit} named /> {since}
        </>
      )}
    </Card>
  );
}

function Against({ answer, unit }: { answer: StepAnswer; unit: Unit }) {
  const basis = base.value;
  if (!basis) return <>{alone.value ? "in the whole window" : "the only step recorded"}</>;
  const name = sideName({ ...basis, alone: isAlone(basis) }, picked.value!);
  const delta = answer.stats.peak_bytes - basis.stats.peak_bytes;
  if (delta === 0) return <span class="shrunk">the same as in {name}</span>;
  return (
    <>
      <Delta bytes={delta} unit={unit} named /> against {name}
    </>
  );
}

interface CardProps {
  id: string;
  label: string;
  value: ComponentChildren;
  /** Where a click leads. */
  to?: RoutePatch;
  children: ComponentChildren;
}

/** A number that is worth a look, under what it is and above what else is known of it. */
export function Card({ id, label, value, to, children }: CardProps) {
  const words = (
    <>
      <span class="label">{label}</span>
      <span class="value">{value}</span>
      <span class="under">{children}</span>
    </>
  );
  if (to)
    return (
      <RouteLink to={to} class="card tile" testid={`card-${id}`}>
        {words}
      </RouteLink>
    );
  return (
    <div class="card tile still" data-testid={`card-${id}`}>
      {words}
    </div>
  );
}
