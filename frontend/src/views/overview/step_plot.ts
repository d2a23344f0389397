/** What charts over steps share: their axes, and the mark of the picked step. */
import uPlot from "uplot";
import { roundStep, tickDecimals, ticks } from "../../draw/scale";
import { MOST_RESERVE } from "../../draw/stack";
import type { Unit } from "../../state/bytes";
import { decimals } from "../../state/numbers";

export function stepAxis(stroke: string): uPlot.Axis {
  return {
    stroke,
    grid: { show: false },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
    size: 26,
    incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000, 10000000],
  };
}

export function byteAxis(unit: Unit, stroke: string, rule: string): uPlot.Axis {
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
      return splits.map((v) => `${decimals(v / unit.size, digits)} ${unit.name}`);
    },
  };
}

/** Room above and below; never so tight that a change of a thousandth looks like a cliff. */
export function around(low: number, high: number): [number, number] {
  const span = Math.max(high - low, high * 0.08, 1);
  return [Math.max(0, low - span * 0.25), high + span * 0.2];
}

/** The lowest and highest of what the picture holds: the reserve is left out where it would flatten the peaks. */
export function rangeOf(peaks: readonly number[], reserves: readonly (number | null)[]): [number, number] {
  const known = reserves.filter((bytes) => bytes !== null);
  const all = reserveIsNear(peaks, reserves) ? [...peaks, ...known] : peaks;
  return around(lowest(all), highest(all));
}

export function reserveIsNear(peaks: readonly number[], reserves: readonly (number | null)[]): boolean {
  return highest(reserves.map((bytes) => bytes ?? 0)) <= MOST_RESERVE * highest(peaks);
}

function lowest(values: readonly number[]): number {
  return values.reduce((low, value) => Math.min(low, value), values[0] ?? 0);
}

export function highest(values: readonly number[]): number {
  return values.reduce((high, value) => Math.max(high, value), 0);
}

export function markPicked(u: uPlot, step: number, bytes: number, color: string, ground: string): void {
  const ratio = uPlot.pxRatio;
  const x = Math.round(u.valToPos(step, "x", true));
  const y = u.valToPos(bytes, "y", true);
  u.ctx.save();
  u.ctx.setLineDash([]);
  u.ctx.strokeStyle = u.ctx.fillStyle = color;
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
