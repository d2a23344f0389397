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
import type { Selection } from "../../state/selection";
import { HEIGHT, type Marks, plotOf } from "./step_chart";

const COLUMNS = 1000;

/** Peaks of all steps that a monitor saw, the recorded ones marked; a click picks a step, a drag zooms. */
export function PeakOfAllSteps({ selection, bytes }: { selection: Selection; bytes: number | undefined }) {
  const { run, worker, device } = picked.value!;
  const zoom = zoomed();
  const steps = useRemote<StepsAnswer>(
    address("steps", { run, worker, device, px: COLUMNS, ...(zoom ? { first: zoom[0], last: zoom[1] } : {}) }),
    0,
    (path) => path.replace(/&(first|last)=[^&]*/g, ""),
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
      <span class="key">
        <span class="line solid" />
        {process ? "resident memory" : "allocated"}
      </span>
      {data?.reserved && (
        <span class="key">
          <span class="line dashes" />
          reserved
        </span>
      )}
      {selection.steps.length > 0 && (
        <span class="key">
          <span class="dot" />
          recorded steps
        </span>
      )}
      {data && data.retries.length > 0 && (
        <span class="key">
          <span class="count-mark" />
          retries
        </span>
      )}
      {data && data.ooms.length > 0 && (
        <span class="key">
          <span class="count-mark oom" />
          out of memory
        </span>
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

function zoomed(): [number, number] | undefined {
  const [first, last] = [Number(route.value.s0), Number(route.value.s1)];
  return Number.isSafeInteger(first) && Number.isSafeInteger(last) && last > first ? [first, last] : undefined;
}
