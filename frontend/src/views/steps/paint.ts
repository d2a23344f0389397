/** Draws the peaks of steps: a line of the highest in each column, a veil down to the lowest, and marks. */
import type { StepsAnswer } from "../../api/types";
import { drawByteAxis, drawStepAxis } from "../../draw/axes";
import { type Palette, readPalette } from "../../draw/palette";
import { linear, type Scale } from "../../draw/scale";
import { MOST_RESERVE } from "../../draw/stack";
import { prepare } from "../../draw/surface";
import { unitFor } from "../../state/bytes";

export const HEIGHT = 170;
export const TOP = 8;
export const BOTTOM = HEIGHT - 26;
/** Pixels from one line of bytes to the next, at least. */
const APART = 22;
/** More points than this would hide the line. */
const MOST_POINTS = 200;

type Context = CanvasRenderingContext2D;

export interface Marks {
  /** The picked step, and its peak where it is known. */
  step: number;
  bytes: number | undefined;
  /** Steps and peaks that were recorded in full, where others were not. */
  recorded: [number, number][];
}

export interface Picture {
  data: StepsAnswer;
  marks: Marks;
  x: Scale;
  y: Scale;
  /** The column that is pointed at. */
  at: number | undefined;
}

export function paintSteps(canvas: HTMLCanvasElement, width: number, picture: Picture): void {
  const context = prepare(canvas, { width, height: HEIGHT });
  if (!context) return;
  const palette = readPalette(canvas, context);
  const { data, x, y } = picture;
  drawByteAxis(context, y, x.range[0], x.range[1], unitFor(highest(data.high)), palette, APART);
  drawStepAxis(context, x, BOTTOM, palette);
  drawLines(context, picture, palette);
  drawCounts(context, data.retries, x, read(canvas, "--warning"));
  drawCounts(context, data.ooms, x, palette.peak);
  drawMarks(context, picture, palette);
}

function drawLines(context: Context, { data, x, y }: Picture, palette: Palette): void {
  const points = (values: readonly (number | null)[]): [number, number][] =>
    values.flatMap((bytes, i) => (bytes === null ? [] : [[x(data.high_step[i]!), y(bytes)] as [number, number]]));
  const high = points(data.high);
  context.globalAlpha = 0.15;
  context.fillStyle = palette.accent;
  trace(context, [...high, ...points(data.low).reverse()]);
  context.fill();
  context.globalAlpha = 1;
  context.lineWidth = 1.5;
  context.strokeStyle = palette.accent;
  trace(context, high);
  context.stroke();
  if (high.length <= MOST_POINTS) for (const [px, py] of high) dot(context, px, py, 2.5, palette.accent);
  if (!data.reserved || !reserveIsNear(data)) return;
  context.setLineDash([5, 4]);
  context.strokeStyle = palette.reserved;
  trace(context, points(data.reserved));
  context.stroke();
  context.setLineDash([]);
}

function trace(context: Context, points: readonly [number, number][]): void {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
}

/** Steps in which something happened that is counted, as strokes at the bottom. */
function drawCounts(context: Context, counts: [number, number][], x: Scale, color: string): void {
  context.fillStyle = color;
  for (const [step] of counts) if (inSight(x, step)) context.fillRect(Math.round(x(step)) - 1, BOTTOM - 9, 2, 9);
}

function drawMarks(context: Context, { data, marks, x, y, at }: Picture, palette: Palette): void {
  const { step, bytes, recorded } = marks;
  for (const [one, size] of recorded) if (inSight(x, one)) dot(context, x(one), y(size), 4, palette.text, palette.ground);
  if (bytes !== undefined && inSight(x, step)) mark(context, x(step), y(bytes), palette.peak, palette.ground);
  if (at !== undefined) mark(context, x(data.high_step[at]!), y(data.high[at]!), palette.accent, palette.ground);
}

function mark(context: Context, x: number, y: number, color: string, ground: string): void {
  context.fillStyle = color;
  context.fillRect(Math.round(x), TOP, 1, BOTTOM - TOP);
  dot(context, x, y, 5, color, ground);
}

function dot(context: Context, x: number, y: number, radius: number, color: string, edge?: string): void {
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fillStyle = color;
  context.fill();
  if (edge === undefined) return;
  context.lineWidth = 1.5;
  context.strokeStyle = edge;
  context.stroke();
}

function inSight(x: Scale, step: number): boolean {
  return step >= x.domain[0] && step <= x.domain[1];
}

function read(element: HTMLElement, name: string): string {
  return getComputedStyle(element).getPropertyValue(name).trim();
}

/** Room above and below; never so tight that a change of a thousandth looks like a cliff. */
export function heights(data: StepsAnswer): Scale {
  const reserved = reserveIsNear(data) ? (data.reserved ?? []).filter((bytes) => bytes !== null) : [];
  const low = [...data.low, ...reserved].reduce((a, b) => Math.min(a, b), data.low[0] ?? 0);
  const high = highest([...data.high, ...reserved]);
  const span = Math.max(high - low, high * 0.08, 1);
  return linear([Math.max(0, low - span * 0.25), high + span * 0.2], [BOTTOM, TOP]);
}

/** Whether the reserve can be drawn without flattening the peaks. */
export function reserveIsNear({ high, reserved }: StepsAnswer): boolean {
  return highest(reserved ?? []) <= MOST_RESERVE * highest(high);
}

export function highest(values: readonly (number | null)[]): number {
  return values.reduce<number>((high, value) => Math.max(high, value ?? 0), 0);
}
