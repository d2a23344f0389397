/** Draws what the allocator held: allocated, pending, what it reserved beyond, and the share of no use below. */
import type { Over, ReserveCurve } from "../api/types";
import { unitFor, withUnit } from "../state/bytes";
import { columnEdges, drawFailed, drawPeak, fillBetween, strokeSteps } from "./area";
import { drawByteAxis, EVENT_AXIS, TIME_AXIS } from "./axes";
import { readPalette, type Palette } from "./palette";
import { linear, type Scale } from "./scale";
import { striped } from "./paint_tape";
import { prepare } from "./surface";

export const CHART_HEIGHT = 330;
const LEVELS = [8, 214] as const;
const SHARES = [246, 300] as const;

type Context = CanvasRenderingContext2D;

export interface ReservePicture {
  curve: ReserveCurve;
  over: Over;
  x: Scale;
  width: number;
  /** Where the time axis counts from. */
  origin: number;
  /** The highest reserved or active of the whole step, so that a zoom keeps the height. */
  highest: number;
}

export function paintReserve(canvas: HTMLCanvasElement, picture: ReservePicture): void {
  const { curve, x, width } = picture;
  const context = prepare(canvas, { width, height: CHART_HEIGHT });
  if (!context) return;
  const palette = readPalette(canvas, context);
  const style = getComputedStyle(canvas);
  const color = (name: string): string => style.getPropertyValue(name).trim();
  const y = linear([0, Math.max(1, picture.highest) * 1.14], [LEVELS[1], LEVELS[0]]);
  const share = linear([0, 1], [SHARES[1], SHARES[0]]);
  const [left, right] = x.range;
  const edges = columnEdges(curve, x);
  drawByteAxis(context, y, left, right, unitFor(picture.highest), palette);
  drawShareAxis(context, share, left, right, palette);
  (picture.over === "event" ? EVENT_AXIS : TIME_AXIS).draw(context, x, SHARES[1] + 4, picture.origin, palette);
  context.save();
  context.beginPath();
  context.rect(left, 0, right - left, CHART_HEIGHT);
  context.clip();
  drawLevels(context, curve, edges, y, color, palette);
  drawShares(context, picture, edges, share, color, palette);
  context.restore();
  drawMarks(context, picture, y, palette);
}

function drawLevels(
  context: Context,
  curve: ReserveCurve,
  edges: number[],
  y: Scale,
  color: (name: string) => string,
  palette: Palette,
): void {
  const active = curve.allocated.map((bytes, c) => bytes + curve.pending[c]!);
  const zero = new Array<number>(curve.px).fill(0);
  if (curve.reserved) fillBetween(context, edges, curve.reserved, active, y, color("--level-unused"));
  fillBetween(context, edges, curve.allocated, zero, y, color("--level-allocated"));
  if (curve.pending.some((bytes) => bytes > 0)) {
    fillBetween(context, edges, active, curve.allocated, y, color("--level-pending"));
    const stripes = striped(context, palette.ground);
    if (stripes) fillBetween(context, edges, active, curve.allocated, y, stripes);
  }
  context.globalAlpha = 0.13;
  fillBetween(context, edges, active, curve.low, y, palette.outline);
  context.globalAlpha = 0.75;
  strokeSteps(context, edges, active, y, palette.outline, 1);
  context.globalAlpha = 1;
  if (!curve.reserved) return;
  context.setLineDash([5, 4]);
  strokeSteps(context, edges, curve.reserved, y, palette.reserved, 1.4);
  context.setLineDash([]);
}

function drawShares(
  context: Context,
  { curve, over, x }: ReservePicture,
  edges: number[],
  y: Scale,
  color: (name: string) => string,
  palette: Palette,
): void {
  if (curve.unused) {
    const shares = curve.unused.map((ratio) => Math.min(1, Math.max(0, ratio ?? 0)));
    fillBetween(context, edges, shares, new Array<number>(curve.px).fill(0), y, color("--level-unused"));
    strokeSteps(context, edges, shares, y, color("--warning"), 1.3);
  }
  context.fillStyle = palette.muted;
  for (const [event, time, ratio] of curve.split) {
    const at = x(over === "event" ? event : time);
    context.fillRect(at - 1, y(ratio) - 1, 2, 2);
  }
}

/** Failed requests as red lines with words; the highest moment as one red mark. */
function drawMarks(context: Context, { curve, over, x }: ReservePicture, y: Scale, palette: Palette): void {
  const [left, right] = x.range;
  const place = (mark: { event: number; time_ns: number }): number => x(over === "event" ? mark.event : mark.time_ns);
  const { peak } = curve;
  const at = { x: place(peak), y: y(peak.bytes) };
  const failed = curve.ooms.map((one) => ({ x: place(one), bytes: one.requested_bytes }));
  const shown = failed.some((one) => one.x >= left - 1 && one.x <= right + 1);
  if (at.x >= left - 1 && at.x <= right + 1)
    drawPeak(context, at, LEVELS[1], shown ? "" : withUnit(peak.bytes), palette, right);
  drawFailed(context, failed, LEVELS[0] + 12, [LEVELS[0], SHARES[1]], palette, x.range);
}

function drawShareAxis(context: Context, y: Scale, left: number, right: number, palette: Palette): void {
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const ratio of [0, 0.5, 1]) {
    const at = Math.round(y(ratio)) + 0.5;
    context.strokeStyle = palette.rule;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(left, at);
    context.lineTo(right, at);
    context.stroke();
    context.fillStyle = palette.muted;
    context.fillText(`${100 * ratio} %`, left - 8, at);
  }
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
}
