/** Draws what the allocator held: allocated, pending, what it reserved beyond, and the share of no use below. */
import type { Over, ReserveCurve } from "../api/allocator";
import { unitFor, withUnit } from "../state/bytes";
import { drawPeak } from "./area";
import { drawByteAxis, EVENT_AXIS, TIME_AXIS } from "./axes";
import { readPalette, type Palette } from "./palette";
import { linear, type Scale } from "./scale";
import { columnStart } from "./stack";
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
  const colour = (name: string): string => style.getPropertyValue(name).trim();
  const y = linear([0, Math.max(1, picture.highest) * 1.14], [LEVELS[1], LEVELS[0]]);
  const share = linear([0, 1], [SHARES[1], SHARES[0]]);
  const [left, right] = x.range;
  const edges = Array.from({ length: curve.px + 1 }, (_, c) => x(columnStart(curve, c)));
  drawByteAxis(context, y, left, right, unitFor(picture.highest), palette);
  drawShareAxis(context, share, left, right, palette);
  (picture.over === "event" ? EVENT_AXIS : TIME_AXIS).draw(context, x, SHARES[1] + 4, picture.origin, palette);
  context.save();
  context.beginPath();
  context.rect(left, 0, right - left, CHART_HEIGHT);
  context.clip();
  drawLevels(context, curve, edges, y, colour, palette);
  drawShares(context, picture, edges, share, colour, palette);
  context.restore();
  drawMarks(context, picture, y, palette);
}

function drawLevels(
  context: Context,
  curve: ReserveCurve,
  edges: number[],
  y: Scale,
  colour: (name: string) => string,
  palette: Palette,
): void {
  const active = curve.allocated.map((bytes, c) => bytes + curve.pending[c]!);
  const zero = new Array<number>(curve.px).fill(0);
  if (curve.reserved) fillBetween(context, edges, curve.reserved, active, y, colour("--level-unused"));
  fillBetween(context, edges, curve.allocated, zero, y, colour("--level-allocated"));
  if (curve.pending.some((bytes) => bytes > 0)) {
    fillBetween(context, edges, active, curve.allocated, y, colour("--level-pending"));
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
  colour: (name: string) => string,
  palette: Palette,
): void {
  if (curve.unused) {
    const shares = curve.unused.map((ratio) => Math.min(1, Math.max(0, ratio ?? 0)));
    fillBetween(context, edges, shares, new Array<number>(curve.px).fill(0), y, colour("--level-unused"));
    strokeSteps(context, edges, shares, y, colour("--warning"), 1.3);
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
  const shown = curve.ooms.filter((failed) => place(failed) >= left - 1 && place(failed) <= right + 1);
  if (at.x >= left - 1 && at.x <= right + 1)
    drawPeak(context, at, LEVELS[1], shown.length ? "" : `peak ${withUnit(peak.bytes)}`, palette, right);
  context.font = "600 12px system-ui, sans-serif";
  for (const failed of shown) {
    const px = Math.min(Math.max(place(failed), left + 1), right - 1);
    context.strokeStyle = palette.peak;
    context.lineWidth = 2;
    context.setLineDash([3, 2]);
    context.beginPath();
    context.moveTo(px, LEVELS[0]);
    context.lineTo(px, SHARES[1]);
    context.stroke();
    context.setLineDash([]);
    const text = `out of memory: ${withUnit(failed.requested_bytes)} requested`;
    const before = px + 8 + context.measureText(text).width > right;
    context.textAlign = before ? "right" : "left";
    context.lineJoin = "round";
    context.strokeStyle = palette.ground;
    context.lineWidth = 4;
    context.strokeText(text, px + (before ? -8 : 8), LEVELS[0] + 12);
    context.fillStyle = palette.peak;
    context.fillText(text, px + (before ? -8 : 8), LEVELS[0] + 12);
    context.textAlign = "left";
  }
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

function fillBetween(
  context: Context,
  edges: number[],
  upper: number[],
  lower: number[],
  y: Scale,
  fill: string | CanvasPattern,
): void {
  context.beginPath();
  for (let c = 0; c < upper.length; c++) {
    if (c === 0) context.moveTo(edges[0]!, y(upper[0]!));
    else context.lineTo(edges[c]!, y(upper[c]!));
    context.lineTo(edges[c + 1]!, y(upper[c]!));
  }
  for (let c = upper.length - 1; c >= 0; c--) {
    context.lineTo(edges[c + 1]!, y(lower[c]!));
    context.lineTo(edges[c]!, y(lower[c]!));
  }
  context.closePath();
  context.fillStyle = fill;
  context.fill();
}

function strokeSteps(
  context: Context,
  edges: number[],
  values: number[],
  y: Scale,
  colour: string,
  width: number,
): void {
  context.beginPath();
  for (let c = 0; c < values.length; c++) {
    if (c === 0) context.moveTo(edges[0]!, y(values[0]!));
    else context.lineTo(edges[c]!, y(values[c]!));
    context.lineTo(edges[c + 1]!, y(values[c]!));
  }
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.stroke();
}
