/** Draws a stacked curve: filled layers, the outline of allocated, reserved dashed above, the peak as one red mark. */
import type { CurveAnswer } from "../api/types";
import { withUnit } from "../state/bytes";
import type { Palette } from "./palette";
import type { Scale } from "./scale";
import { columnStart, layerTops } from "./stack";

export interface Frame {
  x: Scale;
  y: Scale;
}

type Context = CanvasRenderingContext2D;

/** Layers from the bottom; each column is a flat step from its start to its end, so nothing is invented between. */
export function drawLayers(context: Context, curve: CurveAnswer, by: string, frame: Frame, palette: Palette): void {
  const edges = columnEdges(curve, frame.x);
  let below = new Array<number>(curve.px).fill(0);
  layerTops(curve.stacks, curve.px).forEach((top, k) => {
    fillBetween(context, edges, top, below, frame.y, palette.fill(by, curve.keys[k]!, k));
    below = top;
  });
}

/** The line along the top, and a veil between each column's lowest and highest where they differ. */
export function drawOutline(context: Context, curve: CurveAnswer, frame: Frame, palette: Palette, veil = true): void {
  const edges = columnEdges(curve, frame.x);
  context.globalAlpha = 0.13;
  if (veil) fillBetween(context, edges, curve.max, curve.min, frame.y, palette.outline);
  context.globalAlpha = 0.75;
  strokeSteps(context, edges, curve.max, frame.y, palette.outline, 1);
  context.globalAlpha = 1;
}

export function drawReserved(context: Context, curve: CurveAnswer, frame: Frame, palette: Palette): void {
  if (!curve.reserved) return;
  context.setLineDash([5, 4]);
  strokeSteps(context, columnEdges(curve, frame.x), curve.reserved, frame.y, palette.reserved, 1.4);
  context.setLineDash([]);
}

/** One line without fill, for two curves in one picture. */
export function drawLine(
  context: Context,
  curve: CurveAnswer,
  x: Scale,
  y: Scale,
  color: string,
  dash: number[],
): void {
  context.setLineDash(dash);
  strokeSteps(context, columnEdges(curve, x), curve.max, y, color, 1.8);
  context.setLineDash([]);
}

export function drawPeak(
  context: Context,
  at: { x: number; y: number },
  bottom: number,
  size: string,
  palette: Palette,
  right: number,
): void {
  context.strokeStyle = palette.peak;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(Math.round(at.x) + 0.5, bottom);
  context.lineTo(Math.round(at.x) + 0.5, Math.max(4, at.y - 46));
  context.stroke();
  context.fillStyle = palette.peak;
  context.strokeStyle = palette.ground;
  context.lineWidth = 1.5;
  context.beginPath();
  context.arc(at.x, at.y, 4.5, 0, 2 * Math.PI);
  context.fill();
  context.stroke();
  if (size === "") return;
  const label = `peak ${size}`;
  context.font = "600 12px system-ui, sans-serif";
  const width = context.measureText(label).width;
  const left = at.x + 9 + width > right ? at.x - 9 - width : at.x + 9;
  const y = Math.max(16, at.y - 9);
  outlinedText(context, label, left, y, palette.peak, palette, "left");
}

/** Requests that failed, from left to right: lines across the picture, with words at the height `y` if there is room. */
export function drawFailed(
  context: Context,
  failed: readonly { x: number; bytes: number }[],
  y: number,
  [top, bottom]: readonly [number, number],
  palette: Palette,
  [left, right]: Scale["range"],
): void {
  context.font = "600 12px system-ui, sans-serif";
  let [drawn, written] = [-Infinity, -Infinity]; // the last line, and the end of the last words
  for (const { x: place, bytes } of failed) {
    const x = Math.min(Math.max(place, left + 1), right - 1);
    if (Math.abs(x - place) > 2 || x - drawn < 1) continue;
    drawn = x;
    context.strokeStyle = palette.peak;
    context.lineWidth = 2;
    context.setLineDash([3, 2]);
    context.beginPath();
    context.moveTo(x, top);
    context.lineTo(x, bottom);
    context.stroke();
    context.setLineDash([]);
    const text = `out of memory: ${withUnit(bytes)} requested`;
    const width = 8 + context.measureText(text).width;
    const before = x + width > right;
    if ((before ? x - width : x) < written) continue;
    written = before ? x : x + width;
    outlinedText(context, text, before ? x - 8 : x + 8, y, palette.peak, palette, before ? "right" : "left");
  }
}

/** Words that stay readable across lines and areas. */
export function outlinedText(
  context: Context,
  text: string,
  x: number,
  y: number,
  color: string,
  palette: Pick<Palette, "ground">,
  align: CanvasTextAlign,
): void {
  context.textAlign = align;
  context.lineJoin = "round";
  context.strokeStyle = palette.ground;
  context.lineWidth = 5;
  context.strokeText(text, x, y);
  context.fillStyle = color;
  context.fillText(text, x, y);
  context.textAlign = "left";
}

/** Where the columns of an answer begin, and where the last one ends. */
export function columnEdges(curve: Pick<CurveAnswer, "t0" | "t1" | "px">, x: Scale): number[] {
  return Array.from({ length: curve.px + 1 }, (_, c) => x(columnStart(curve, c)));
}

/** A flat step for each column, from its beginning to its end. */
function steps(context: Context, edges: number[], values: number[], y: Scale): void {
  values.forEach((value, c) => {
    const height = y(value);
    if (c === 0) context.moveTo(edges[0]!, height);
    else context.lineTo(edges[c]!, height);
    context.lineTo(edges[c + 1]!, height);
  });
}

/** Fills what lies between two rows of steps. */
export function fillBetween(
  context: Context,
  edges: number[],
  upper: number[],
  lower: number[],
  y: Scale,
  fill: string | CanvasPattern,
): void {
  context.beginPath();
  steps(context, edges, upper, y);
  for (let c = lower.length - 1; c >= 0; c--) {
    const height = y(lower[c]!);
    context.lineTo(edges[c + 1]!, height);
    context.lineTo(edges[c]!, height);
  }
  context.closePath();
  context.fillStyle = fill;
  context.fill();
}

export function strokeSteps(
  context: Context,
  edges: number[],
  values: number[],
  y: Scale,
  color: string,
  width: number,
): void {
  context.beginPath();
  steps(context, edges, values, y);
  context.strokeStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.stroke();
}
