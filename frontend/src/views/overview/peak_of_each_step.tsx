import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { watchWidth } from "../../draw/surface";
import { dark } from "../../host/theme";
import { navigate } from "../../state/app";
import { unitFor, withUnit } from "../../state/bytes";
import type { Selection } from "../../state/selection";
import { byteAxis, highest, markPicked, rangeOf, reserveIsNear, stepAxis } from "./step_plot";
import { KeyEntry } from "../key_entry";

const HEIGHT = 170;

/** Allocated and reserved peaks over the steps; a click picks a step. */
export function PeakOfEachStep({ selection }: { selection: Selection }) {
  const box = useRef<HTMLDivElement>(null);
  const { steps, step } = selection;
  const theme = dark.value;
  useEffect(() => {
    if (!box.current || steps.length < 2) return;
    const element = box.current;
    let plot: uPlot | undefined;
    const stop = watchWidth(element, (width) => {
      if (plot) plot.setSize({ width, height: HEIGHT });
      else plot = makePlot(element, width, selection);
    });
    return () => (stop(), plot?.destroy());
  }, [steps, step, theme]);
  if (steps.length < 2) return null;
  const peaks = steps.map((s) => s.stats.peak_bytes);
  const words = `Peak of ${steps.length} steps, from ${withUnit(peaks.reduce((a, b) => Math.min(a, b)))} to ${withUnit(highest(peaks))}; step ${step} is picked.`;
  const reserves = steps.map((s) => s.stats.peak_reserved_bytes);
  const reserved = highest(reserves.map((bytes) => bytes ?? 0));
  const near = reserveIsNear(peaks, reserves);
  return (
    <section class="card" data-testid="peak-of-each-step">
      <div class="row">
        <h2 class="grow">Peak of each step</h2>
        <KeyEntry look="line solid">allocated</KeyEntry>
        {reserved > 0 && (
          <span class="key">
            {near && <span class="line dashes" />}
            {near ? "reserved" : `↑ reserved ${withUnit(reserved)}, not drawn`}
          </span>
        )}
        <span class="key muted">click picks a step</span>
      </div>
      <div ref={box} class="plot" role="img" aria-label={words} />
    </section>
  );
}

function makePlot(element: HTMLElement, width: number, selection: Selection): uPlot {
  const { steps } = selection;
  const style = getComputedStyle(element);
  const color = (name: string): string => style.getPropertyValue(name).trim();
  const xs = steps.map((s) => s.step);
  const allocated = steps.map((s) => s.stats.peak_bytes);
  const reserved = steps.map((s) => s.stats.peak_reserved_bytes);
  const unit = unitFor(...allocated);
  const plot = new uPlot(
    {
      width,
      height: HEIGHT,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: 9, fill: color("--accent"), stroke: color("--card") },
      },
      scales: { x: { time: false }, y: { range: () => rangeOf(allocated, reserved) } },
      axes: [
        stepAxis(color("--muted")),
        byteAxis(unit, color("--muted"), color("--rule")),
      ],
      series: [
        {},
        {
          label: "allocated",
          stroke: color("--accent"),
          width: 1.5,
          points: { show: steps.length <= 200, size: 6, fill: color("--accent") },
        },
        {
          label: "reserved",
          stroke: color("--reserved"),
          width: 1.3,
          dash: [5, 4],
          points: { show: false },
        },
      ],
      hooks: {
        draw: [(u) => markPicked(u, selection.step, selection.stats!.peak_bytes, color("--peak"), color("--card"))],
        setCursor: [(u) => showTooltip(u, element, selection)],
      },
    },
    [xs, allocated, reserved],
    element,
  );
  plot.over.addEventListener("click", () => {
    const chosen = plot.cursor.idx == null ? undefined : steps[plot.cursor.idx];
    if (chosen) navigate({ step: String(chosen.step) });
  });
  return plot;
}

function showTooltip(u: uPlot, element: HTMLElement, { steps }: Selection): void {
  const choice = u.cursor.idx == null ? undefined : steps[u.cursor.idx];
  const reserved = choice?.stats.peak_reserved_bytes;
  element.title = choice
    ? `step ${choice.step}: ${withUnit(choice.stats.peak_bytes)}${reserved ? `, reserved ${withUnit(reserved)}` : ""}`
    : "";
}
