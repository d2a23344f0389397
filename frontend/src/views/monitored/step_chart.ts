/** Draws the peaks of very many steps: a line of the highest in each column, and a veil down to the lowest. */
import uPlot from "uplot";
import type { StepsAnswer } from "../../api/monitored";
import { unitFor, withUnit } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import { around, byteAxis, markPicked, stepAxis } from "../overview/step_plot";

export const HEIGHT = 170;
const NEAR = 7;

export interface Marks {
  /** The picked step, and its peak where it is known. */
  step: number;
  bytes: number | undefined;
  /** Steps and peaks that were recorded in full. */
  recorded: [number, number][];
}

export function plotOf(
  element: HTMLElement,
  width: number,
  data: StepsAnswer,
  marks: Marks,
  onPick: (step: number) => void,
  onZoom: (first: number, last: number) => void,
): uPlot {
  const style = getComputedStyle(element);
  const color = (name: string): string => style.getPropertyValue(name).trim();
  const unit = unitFor(...data.high.slice(0, 1), Math.max(...data.high));
  const reserved = data.reserved ?? data.high.map(() => null);
  const few = data.high.length <= 200;
  const plot = new uPlot(
    {
      width,
      height: HEIGHT,
      padding: [8, 24, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: true, y: false, dist: 6, setScale: false },
        points: { size: 9, fill: color("--accent"), stroke: color("--card") },
      },
      scales: { x: { time: false }, y: { range: (_, low, high) => around(low, high) } },
      axes: [stepAxis(color("--muted")), byteAxis(unit, color("--muted"), color("--rule"))],
      series: [
        {},
        { stroke: color("--accent"), width: 1.5, points: { show: few, size: 5, fill: color("--accent") } },
        { stroke: "transparent", width: 0, points: { show: false } },
        { stroke: color("--reserved"), width: 1.3, dash: [5, 4], points: { show: false } },
      ],
      bands: [{ series: [1, 2], fill: color("--accent-soft") }],
      hooks: {
        draw: [
          (u) => {
            markCounts(u, data.retries, color("--warning"));
            markCounts(u, data.ooms, color("--peak"));
            markRecorded(u, marks.recorded, color("--text"), color("--card"));
            const at = u.scales["x"]!;
            const shown = marks.bytes !== undefined && marks.step >= at.min! && marks.step <= at.max!;
            if (shown) markPicked(u, marks.step, marks.bytes!, color("--peak"), color("--card"));
          },
        ],
        setCursor: [(u) => (element.title = tooltip(u, data))],
        setSelect: [(u) => select(u, onZoom)],
      },
    },
    [data.high_step, data.high, data.low, reserved],
    element,
  );
  plot.over.addEventListener("click", (event) => {
    const near = nearest(plot, marks.recorded, event.offsetX, event.offsetY);
    const column = plot.cursor.idx;
    const step = near ?? (column == null ? undefined : data.high_step[column]);
    if (step !== undefined && plot.select.width < 6) onPick(step);
  });
  return plot;
}

/** A stretch of steps was dragged over. */
function select(u: uPlot, onZoom: (first: number, last: number) => void): void {
  if (u.select.width < 6) return;
  const first = Math.ceil(u.posToVal(u.select.left, "x"));
  const last = Math.floor(u.posToVal(u.select.left + u.select.width, "x"));
  if (last > first) onZoom(Math.max(0, first), last);
}

/** A recorded step under the pointer. */
function nearest(u: uPlot, recorded: [number, number][], x: number, y: number): number | undefined {
  const within = recorded.filter(
    ([step, bytes]) => Math.hypot(u.valToPos(step, "x") - x, u.valToPos(bytes, "y") - y) <= NEAR,
  );
  return within[0]?.[0];
}

function tooltip(u: uPlot, data: StepsAnswer): string {
  const column = u.cursor.idx;
  if (column == null || data.high[column] === undefined) return "";
  const [first, last] = [data.first[column]!, data.last[column]!];
  const peak = `${withUnit(data.high[column]!)} (${grouped(data.high[column]!)} bytes)`;
  const kept = data.reserved ? `, reserved ${withUnit(data.reserved[column]!)}` : "";
  if (first === last) return `step ${first}: ${peak}${kept}`;
  const lowest = withUnit(data.low[column]!);
  return `steps ${first} to ${last}: highest ${peak} in step ${data.high_step[column]}, lowest ${lowest}${kept}`;
}

function markCounts(u: uPlot, counts: [number, number][], color: string): void {
  const ratio = uPlot.pxRatio;
  u.ctx.save();
  u.ctx.fillStyle = color;
  for (const [step] of counts) {
    const x = u.valToPos(step, "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    u.ctx.fillRect(Math.round(x) - ratio, u.bbox.top + u.bbox.height - 9 * ratio, 2 * ratio, 9 * ratio);
  }
  u.ctx.restore();
}

function markRecorded(u: uPlot, recorded: [number, number][], color: string, ground: string): void {
  const ratio = uPlot.pxRatio;
  u.ctx.save();
  u.ctx.fillStyle = color;
  u.ctx.strokeStyle = ground;
  u.ctx.lineWidth = 1.5 * ratio;
  for (const [step, bytes] of recorded) {
    const x = u.valToPos(step, "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
    u.ctx.beginPath();
    u.ctx.arc(x, u.valToPos(bytes, "y", true), 4 * ratio, 0, 2 * Math.PI);
    u.ctx.fill();
    u.ctx.stroke();
  }
  u.ctx.restore();
}
