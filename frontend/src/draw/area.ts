/** Draws a stacked curve: filled layers, the outline of allocated, reserved dashed above, the peak as one red mark. */
import type { CurveAnswer } from "../api/types";
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
  const tops = layerTops(curve.stacks, curve.px);
  let below: number[] | null = null;
  tops.forEach((top, k) => {
    context.beginPath();
    steps(context, edges, top, frame.y, false);
    if (below) stepsBack(context, edges, below, frame.y);
    else base(context, edges, frame.y);
    context.closePath();
    context.fillStyle = palette.fill(by, curve.keys[k]!, k);
    context.fill();
    below = top;
  });
}

/** The line along the top, and a veil between each column's lowest and highest where they differ. */
export function drawOutline(context: Context, curve: CurveAnswer, frame: Frame, palette: Palette, veil = true): void {
  const edges = columnEdges(curve, frame.x);
  if (veil) {
    context.beginPath();
    steps(context, edges, curve.max, frame.y, false);
    stepsBack(context, edges, curve.min, frame.y);
    context.closePath();
    context.globalAlpha = 0.13;
    context.fillStyle = palette.outline;
    context.fill();
  }
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
  colour: string,
  dash: number[],
): void {
  context.setLineDash(dash);
  strokeSteps(context, columnEdges(curve, x), curve.max, y, colour, 1.8);
  context.setLineDash([]);
}

export function drawPeak(
  context: Context,
  at: { x: number; y: number },
  bottom: number,
  label: string,
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
  if (label === "") return;
  context.font = "600 12px system-ui, sans-serif";
  const width = context.measureText(label).width;
  const left = at.x + 9 + width > right ? at.x - 9 - width : at.x + 9;
  const y = Math.max(16, at.y - 9);
  context.lineJoin = "round";
  context.strokeStyle = palette.ground;
  context.lineWidth = 6;
  context.strokeText(label, left, y);
  context.fillStyle = palette.peak;
  context.fillText(label, left, y);
}

function columnEdges(curve: CurveAnswer, x: Scale): number[] {
  return Array.from({ length: curve.px + 1 }, (_, c) => x(columnStart(curve, c)));
}

function steps(context: Context, edges: number[], values: number[], y: Scale, join: boolean): void {
  for (let c = 0; c < values.length; c++) {
    const height = y(values[c]!);
    if (c === 0 && !join) context.moveTo(edges[0]!, height);
    else context.lineTo(edges[c]!, height);
    context.lineTo(edges[c + 1]!, height);
  }
}

function stepsBack(context: Context, edges: number[], values: number[], y: Scale): void {
  for (let c = values.length - 1; c >= 0; c--) {
    const height = y(values[c]!);
    context.lineTo(edges[c + 1]!, height);
    context.lineTo(edges[c]!, height);
  }
}

function base(context: Context, edges: number[], y: Scale): void {
  context.lineTo(edges.at(-1)!, y(0));
  context.lineTo(edges[0]!, y(0));
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
  steps(context, edges, values, y, false);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.stroke();
}
