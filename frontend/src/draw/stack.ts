/** The geometry of a stacked curve: pure numbers, no canvas. */
import type { CurveAnswer } from "../api/types";

/** tops[k][c]: bytes at the upper edge of layer k in column c; the last layer's tops are the column's total. */
export function layerTops(stacks: number[][], columns: number): number[][] {
  const tops: number[][] = [];
  let below = new Array<number>(columns).fill(0);
  for (const stack of stacks) {
    const top = below.map((bytes, c) => bytes + (stack[c] ?? 0));
    tops.push(top);
    below = top;
  }
  return tops;
}

/** The column that holds time t, clamped to the curve. */
export function columnAt(curve: Pick<CurveAnswer, "t0" | "t1" | "px">, t: number): number {
  const share = (t - curve.t0) / Math.max(1, curve.t1 - curve.t0);
  return Math.min(curve.px - 1, Math.max(0, Math.floor(share * curve.px)));
}

export function columnStart(curve: Pick<CurveAnswer, "t0" | "t1" | "px">, column: number): number {
  return curve.t0 + ((curve.t1 - curve.t0) * column) / curve.px;
}

/** What the curve itself knows of a column, before the server has answered: each key with its bytes. */
export function columnParts(curve: CurveAnswer, column: number): { key: string; bytes: number }[] {
  return curve.keys.map((key, k) => ({ key, bytes: curve.stacks[k]?.[column] ?? 0 }));
}

/** The highest value that the picture must hold, with room for the peak's label. */
export function ceiling(curves: readonly CurveAnswer[]): number {
  let top = 1;
  for (const curve of curves) {
    for (const bytes of curve.max) if (bytes > top) top = bytes;
    for (const bytes of curve.reserved ?? []) if (bytes > top) top = bytes;
  }
  return top * 1.12;
}

/** How often the highest allocated a reserve may be, to be drawn. */
export const MOST_RESERVE = 3;

/** Whether a reserve leaves room to see what is allocated: it is at most three times the highest. */
export function reserveFits(curves: readonly CurveAnswer[]): boolean {
  return highestReserve(curves) <= MOST_RESERVE * ceiling(curves.map((curve) => ({ ...curve, reserved: null })));
}

export function highestReserve(curves: readonly CurveAnswer[]): number {
  return curves.reduce((top, { reserved }) => Math.max(top, ...(reserved ?? [0])), 0);
}

/** A window of [t0, t1] zoomed by `factor` around `t`, kept inside `whole` and never under `least` wide. */
export function zoomed(
  window: readonly [number, number],
  t: number,
  factor: number,
  whole: readonly [number, number],
  least = 100,
): [number, number] {
  const width = Math.min(whole[1] - whole[0], Math.max(least, (window[1] - window[0]) * factor));
  const share = (t - window[0]) / Math.max(1, window[1] - window[0]);
  return kept([t - width * share, t + width * (1 - share)], whole);
}

/** A window of [t0, t1] moved by a share of its width, kept inside `whole`. */
export function panned(
  window: readonly [number, number],
  share: number,
  whole: readonly [number, number],
): [number, number] {
  const far = share * (window[1] - window[0]);
  return kept([window[0] + far, window[1] + far], whole);
}

/** Where a turn of the wheel leads: nearer or further about a place, with Shift along the axis. */
export function turned(
  event: Pick<WheelEvent, "shiftKey" | "deltaX" | "deltaY">,
  window: readonly [number, number],
  at: number,
  whole: readonly [number, number],
  least = 100,
): [number, number] {
  if (event.shiftKey) return panned(window, (event.deltaY || event.deltaX) / 800, whole);
  return zoomed(window, at, Math.exp(event.deltaY / 400), whole, least);
}

/** The same width, moved inside `whole`, in whole nanoseconds. */
export function kept(window: readonly [number, number], whole: readonly [number, number]): [number, number] {
  const width = Math.min(window[1] - window[0], whole[1] - whole[0]);
  const start = Math.min(Math.max(window[0], whole[0]), whole[1] - width);
  return [Math.round(start), Math.round(start + width)];
}
