import { useEffect, useRef } from "preact/hooks";
import type uPlot from "uplot";
import type { StepsAnswer } from "../../api/monitored";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import { watchWidth } from "../../draw/surface";
import { dark } from "../../host/theme";
import { navigate, picked, route } from "../../state/app";
import { withUnit } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import { stepsZoom } from "../../state/over";
import type { Selection } from "../../state/selection";
import { HEIGHT, type Marks, plotOf } from "./step_chart";
import { KeyEntry } from "../key_entry";

const COLUMNS = 1000;

/** Peaks of all steps that a monitor saw, the recorded ones marked; a click picks a step, a drag zooms. */
export function PeakOfAllSteps({ selection, bytes }: { selection: Selection; bytes: number | undefined }) {
  const { run, worker, device } = picked.value!;
  const zoom = stepsZoom(route.value);
  const steps = useRemote<StepsAnswer>(
    address("steps", { run, worker, device, px: COLUMNS, ...(zoom ? { first: zoom[0], last: zoom[1] } : {}) }),
    0,
    ["first", "last"],
  );
  const data = steps.data;
  const marks: Marks = {
    step: selection.step,
    bytes,
    recorded: selection.steps.map((one) => [one.step, one.stats.peak_bytes]),
  };
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
        <Key data={data} selection={selection} />
      </div>
      {steps.failure ? (
        <p class="muted">{steps.failure.what}</p>
      ) : data && data.count === 0 ? (
        <p class="muted">No steps in this range.</p>
      ) : (
        <Plot data={data} marks={marks} />
      )}
      {data && data.count > data.high.length && (
        <p class="foot" data-testid="columns-foot">
          {grouped(data.count)} steps in {grouped(data.high.length)} columns, each with its exact highest and lowest peak.
        </p>
      )}
    </section>
  );
}

function Key({ data, selection }: { data: StepsAnswer | undefined; selection: Selection }) {
  const process = selection.monitored?.kind === "process";
  return (
    <>
      <KeyEntry look="line solid">{process ? "resident memory" : "allocated"}</KeyEntry>
      {data?.reserved && (
        <KeyEntry look="line dashes">reserved</KeyEntry>
      )}
      {selection.steps.length > 0 && (
        <KeyEntry look="dot">recorded steps</KeyEntry>
      )}
      {data && data.retries.length > 0 && (
        <KeyEntry look="count-mark">retries</KeyEntry>
      )}
      {data && data.ooms.length > 0 && (
        <KeyEntry look="count-mark oom">out of memory</KeyEntry>
      )}
      <span class="key muted">click picks a step · drag zooms</span>
    </>
  );
}

function Plot({ data, marks }: { data: StepsAnswer | undefined; marks: Marks }) {
  const box = useRef<HTMLDivElement>(null);
  const theme = dark.value;
  const drawn = JSON.stringify(marks);
  useEffect(() => {
    if (!box.current || !data) return;
    const element = box.current;
    let plot: uPlot | undefined;
    const stop = watchWidth(element, (width) => {
      if (plot) plot.setSize({ width, height: HEIGHT });
      else plot = plotOf(element, width, data, marks, pickStep, zoomTo);
    });
    return () => (stop(), plot?.destroy());
  }, [data, drawn, theme]);
  return <div ref={box} class="plot" role="img" aria-label={data ? words(data, marks) : ""} />;
}

function words(data: StepsAnswer, { step }: Marks): string {
  const [low, high] = [Math.min(...data.low), Math.max(...data.high)];
  return `Peak of ${grouped(data.count)} steps, from ${withUnit(low)} to ${withUnit(high)}; step ${step} is picked.`;
}

function pickStep(step: number): void {
  navigate({ step: String(step) });
}

function zoomTo(first: number, last: number): void {
  navigate({ s0: String(first), s1: String(last) });
}
