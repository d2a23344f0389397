/** Grid lines with bytes at the left, times along the bottom. */
import { inUnit, type Unit } from "../state/bytes";
import { counted, decimals, grouped } from "../state/numbers";
import { duration, inTimeUnit, timeUnitFor } from "../state/time";
import type { Palette } from "./palette";
import { linear, roundStep, type Scale, tickDecimals, ticks } from "./scale";
import { sharpness } from "./surface";

type Context = CanvasRenderingContext2D;

/** CSS pixels beside a plot: at its left for the labels of bytes. */
const MARGIN = { left: 78, right: 12 };

/** How wide the plot in a box is. */
export function plotWidth(width: number): number {
  return Math.max(1, width - MARGIN.left - MARGIN.right);
}

/** As many columns as the plot has pixels on this screen. */
export function columnsIn(width: number, most = 4000): number {
  return Math.min(most, Math.max(1, Math.round(plotWidth(width) * sharpness())));
}

/** The horizontal scale of the plot in a box. */
export function across(window: readonly [number, number], width: number): Scale {
  return linear(window, [MARGIN.left, MARGIN.left + plotWidth(width)]);
}

export function drawByteAxis(
  context: Context,
  y: Scale,
  left: number,
  right: number,
  unit: Unit,
  palette: Palette,
  apart = 38,
): void {
  const [low, high] = y.domain;
  const most = Math.max(2, Math.floor(Math.abs(y.range[0] - y.range[1]) / apart));
  const digits = tickDecimals(roundStep((high - low) / unit.size, most));
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of ticks(low, high, most, unit.size)) {
    const at = Math.round(y(value)) + 0.5;
    context.strokeStyle = palette.rule;
    context.lineWidth = 1;
    line(context, left, at, right, at);
    context.fillStyle = palette.muted;
    const number = value === 0 ? "0" : digits > 2 ? inUnit(value, unit) : decimals(value / unit.size, digits);
    context.fillText(`${number} ${unit.name}`, left - 8, at);
  }
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
}

/** Whole numbers of steps. */
export function drawStepAxis(context: Context, x: Scale, top: number, palette: Palette): void {
  const [from, to] = x.domain;
  const most = Math.max(1, Math.min(to - from, Math.floor((x.range[1] - x.range[0]) / 64)));
  for (const step of ticks(from, to, most)) drawTick(context, x, step, top, String(step), palette);
}

/** Times count from `origin`, the start of the step. The unit is that of the longest beside it, in `longest` nanoseconds. */
export function drawTimeAxis(context: Context, x: Scale, top: number, origin: number, palette: Palette, longest = 0): void {
  const [from, to] = [x.domain[0] - origin, x.domain[1] - origin];
  if (to - from <= 1) return; // a recording without events, which has no length
  const unit = timeUnitFor(to - from, longest);
  const digits = tickDecimals(roundStep((to - from) / unit.ns, mostTicks(x)));
  for (const value of ticks(from, to, mostTicks(x), unit.ns))
    drawTick(context, x, value + origin, top, `${inTimeUnit(value, unit, digits)} ${unit.name}`, palette);
}

/** Event indices count from the trace's first event, whatever is shown. */
function drawEventAxis(context: Context, x: Scale, top: number, _origin: number, palette: Palette): void {
  const [from, to] = x.domain;
  for (const value of ticks(from, to, Math.min(mostTicks(x), Math.max(1, Math.floor(to - from)))))
    drawTick(context, x, value, top, `event ${grouped(value)}`, palette);
}

function mostTicks(x: Scale): number {
  return Math.max(2, Math.floor((x.range[1] - x.range[0]) / 110));
}

/** A short line with its label below, which stays between the plot's ends. */
function drawTick(context: Context, x: Scale, value: number, top: number, label: string, palette: Palette): void {
  const [left, right] = x.range;
  const at = Math.round(x(value)) + 0.5;
  context.strokeStyle = palette.rule;
  line(context, at, top, at, top + 4);
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "center";
  context.textBaseline = "top";
  context.fillStyle = palette.muted;
  const half = context.measureText(label).width / 2;
  context.fillText(label, Math.min(Math.max(at, left + half), right - half), top + 6);
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
}

/** What the horizontal axis counts: how its ticks are drawn, how a length and a place of it read, the least it zooms to. */
export interface Axis {
  draw: typeof drawTimeAxis;
  words: (length: number) => string;
  /** Times count from `origin`. */
  place: (at: number, origin: number) => string;
  least: number;
}

export const TIME_AXIS: Axis = { draw: drawTimeAxis, words: duration, place: (at, origin) => duration(at - origin), least: 100 };
export const EVENT_AXIS: Axis = {
  draw: drawEventAxis,
  words: (count) => counted(Math.round(count), "event"),
  place: (at) => `event ${grouped(Math.max(0, Math.floor(at)))}`,
  least: 8,
};

function line(context: Context, x0: number, y0: number, x1: number, y1: number): void {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}
