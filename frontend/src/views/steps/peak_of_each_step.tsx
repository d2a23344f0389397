import { useMemo } from "preact/hooks";
import type { StepsAnswer } from "../../api/types";
import type { Selection, StepChoice } from "../../state/selection";
import { StepChart, StepKey } from "./step_chart";

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
