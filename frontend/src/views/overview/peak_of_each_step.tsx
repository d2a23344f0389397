import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { roundStep, tickDecimals, ticks } from "../../draw/scale";
import { watchWidth } from "../../draw/surface";
import { dark } from "../../host/theme";
import { navigate } from "../../state/app";
import { type Unit, unitFor, withUnit } from "../../state/bytes";
import type { Selection } from "../../state/selection";

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
  const words = `Peak of ${steps.length} steps, from ${withUnit(Math.min(...peaks))} to ${withUnit(Math.max(...peaks))}; step ${step} is picked.`;
  const reserved = steps.some((s) => s.stats.peak_reserved_bytes !== null);
  return (
    <section class="card" data-testid="peak-of-each-step">
      <div class="row">
        <h2 class="grow">Peak of each step</h2>
        <span class="key">
          <span class="line solid" />
          allocated
        </span>
        {reserved && (
          <span class="key">
            <span class="line dashes" />
            reserved
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
  const colour = (name: string): string => style.getPropertyValue(name).trim();
  const xs = steps.map((s) => s.step);
  const allocated = steps.map((s) => s.stats.peak_bytes);
  const reserved = steps.map((s) => s.stats.peak_reserved_bytes);
  const unit = unitFor(...allocated);
  const stepped = uPlot.paths.stepped!({ align: 1 });
  const plot = new uPlot(
    {
      width,
      height: HEIGHT,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: 9, fill: colour("--accent"), stroke: colour("--card") },
      },
      scales: { x: { time: false }, y: { range: (_, low, high) => around(low, high) } },
      axes: [
        {
          stroke: colour("--muted"),
          grid: { show: false },
          ticks: { show: false },
          font: "11px system-ui, sans-serif",
          size: 26,
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10000, 100000],
        },
        byteAxis(unit, colour("--muted"), colour("--rule")),
      ],
      series: [
        {},
        {
          label: "allocated",
          stroke: colour("--accent"),
          width: 1.5,
          points: { show: steps.length <= 200, size: 6, fill: colour("--accent") },
        },
        {
          label: "reserved",
          stroke: colour("--reserved"),
          width: 1.3,
          dash: [5, 4],
          paths: stepped,
          points: { show: false },
        },
      ],
      hooks: {
        draw: [(u) => markPicked(u, selection, colour("--peak"), colour("--card"))],
        setCursor: [(u) => tell(u, element, selection)],
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

function byteAxis(unit: Unit, stroke: string, rule: string): uPlot.Axis {
  return {
    stroke,
    grid: { stroke: rule, width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    size: 78,
    splits: (_u, _i, low, high) => ticks(low, high, 4, unit.size),
    values: (u, splits) => {
      const { min = 0, max = 1 } = u.scales["y"]!;
      const digits = tickDecimals(roundStep((max! - min!) / unit.size, 4));
      return splits.map((v) => `${(v / unit.size).toFixed(digits)} ${unit.name}`);
    },
  };
}

/** Room above and below; never so tight that a change of a thousandth looks like a cliff. */
function around(low: number, high: number): [number, number] {
  const span = Math.max(high - low, high * 0.08, 1);
  return [Math.max(0, low - span * 0.25), high + span * 0.2];
}

function markPicked(u: uPlot, { step, stats }: Selection, colour: string, ground: string): void {
  const ratio = uPlot.pxRatio;
  const x = Math.round(u.valToPos(step, "x", true));
  const y = u.valToPos(stats.peak_bytes, "y", true);
  u.ctx.save();
  u.ctx.setLineDash([]);
  u.ctx.strokeStyle = u.ctx.fillStyle = colour;
  u.ctx.lineWidth = ratio;
  u.ctx.beginPath();
  u.ctx.moveTo(x + 0.5, u.bbox.top);
  u.ctx.lineTo(x + 0.5, u.bbox.top + u.bbox.height);
  u.ctx.stroke();
  u.ctx.beginPath();
  u.ctx.arc(x, y, 5 * ratio, 0, 2 * Math.PI);
  u.ctx.fill();
  u.ctx.strokeStyle = ground;
  u.ctx.stroke();
  u.ctx.restore();
}

function tell(u: uPlot, element: HTMLElement, { steps }: Selection): void {
  const choice = u.cursor.idx == null ? undefined : steps[u.cursor.idx];
  const reserved = choice?.stats.peak_reserved_bytes;
  element.title = choice
    ? `step ${choice.step}: ${withUnit(choice.stats.peak_bytes)}${reserved ? `, reserved ${withUnit(reserved)}` : ""}`
    : "";
}
