import { useMemo } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { StepsAnswer } from "../../api/types";
import { navigate, picked, route } from "../../state/app";
import { grouped } from "../../state/numbers";
import { stepsZoom } from "../../state/over";
import type { Selection, StepChoice } from "../../state/selection";
import { KeyEntry } from "../key_entry";
import { StepChart, StepKey } from "./step_chart";

const COLUMNS = 1000;

/** Peaks of all steps that a monitor saw, the recorded ones marked; a drag zooms. */
export function PeakOfAllSteps({ selection, bytes }: { selection: Selection; bytes: number | undefined }) {
  const { run, worker, device } = picked.value!;
  const zoom = stepsZoom(route.value);
  const steps = useRemote<StepsAnswer>(
    address("steps", { run, worker, device, px: COLUMNS, ...(zoom ? { first: zoom[0], last: zoom[1] } : {}) }),
    0,
    ["first", "last"],
  );
  const isWhole = !zoom && selection.monitored?.kind !== "process";
  const data = useMemo(
    () => (steps.data && isWhole ? withLater(steps.data, selection.steps) : steps.data),
    [steps.data, isWhole, selection.steps],
  );
  const recorded = selection.steps.map((one): [number, number] => [one.step, one.stats.peak_bytes]);
  return (
    <section class={steps.stale ? "card stale" : "card"} data-testid="peak-of-all-steps" aria-busy={steps.loading}>
      <div class="row">
        <h2 class="grow">Peak of each step</h2>
        {zoom && (
          <button
            type="button"
            class="quiet"
            data-testid="all-steps"
            onClick={() => navigate({ s0: undefined, s1: undefined })}
          >
            All steps
          </button>
        )}
        <StepKey data={data} measured={selection.monitored?.kind === "process" ? "resident memory" : "allocated"} />
        {recorded.length > 0 && <KeyEntry look="dot">recorded steps</KeyEntry>}
        {data && data.retries.length > 0 && <KeyEntry look="count-mark">retries</KeyEntry>}
        {data && data.ooms.length > 0 && <KeyEntry look="count-mark oom">out of memory</KeyEntry>}
        <span class="key muted">click picks a step · drag zooms</span>
      </div>
      {steps.failure ? (
        <p class="muted">{steps.failure.what}</p>
      ) : !data ? (
        <div class="plot" />
      ) : data.count === 0 ? (
        <p class="muted">No steps in this range.</p>
      ) : (
        <StepChart data={data} marks={{ step: selection.step, bytes, recorded }} zooms />
      )}
      {data && data.count > data.high.length && (
        <p class="foot" data-testid="columns-foot">
          {grouped(data.count)} steps in {grouped(data.high.length)} columns, each with its exact highest and lowest peak.
        </p>
      )}
    </section>
  );
}

/** Peaks of the steps that were recorded in full. */
export function PeakOfEachStep({ selection: { steps, step, stats } }: { selection: Selection }) {
  const data = useMemo(() => columnsOf(steps), [steps]);
  if (steps.length < 2) return null;
  return (
    <section class="card" data-testid="peak-of-each-step">
      <div class="row">
        <h2 class="grow">Peak of each step</h2>
        <StepKey data={data} measured="allocated" />
        <span class="key muted">click picks a step</span>
      </div>
      <StepChart data={data} marks={{ step, bytes: stats?.peak_bytes, recorded: [] }} />
    </section>
  );
}

/** With the recorded steps after all that a monitor saw, which counts a step when it ends: one in which a request failed does not. */
export function withLater(watched: StepsAnswer, steps: StepChoice[]): StepsAnswer {
  const end = watched.last.at(-1) ?? Infinity;
  const later = columnsOf(steps.filter(({ step }) => step > end));
  return {
    ...watched,
    count: watched.count + later.count,
    first: [...watched.first, ...later.first],
    last: [...watched.last, ...later.last],
    low: [...watched.low, ...later.low],
    high: [...watched.high, ...later.high],
    high_step: [...watched.high_step, ...later.high_step],
    reserved: watched.reserved && [...watched.reserved, ...(later.reserved ?? [])],
  };
}

/** A column each. */
function columnsOf(steps: StepChoice[]): StepsAnswer {
  const numbers = steps.map((one) => one.step);
  const peaks = steps.map((one) => one.stats.peak_bytes);
  return {
    count: steps.length,
    first: numbers,
    last: numbers,
    low: peaks,
    high: peaks,
    high_step: numbers,
    reserved: steps.map((one) => one.stats.peak_reserved_bytes),
    retries: [],
    ooms: [],
  };
}
