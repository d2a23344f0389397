/** Puts the canvases of the Allocations view together. */
import type { AllocationAnswer, BandsAnswer } from "../../api/types";
import { columnEdges, drawPeak, strokeSteps } from "../../draw/area";
import { type Axis, drawByteAxis } from "../../draw/axes";
import { NOTHING, type Owners } from "../../draw/bands";
import { type BandColors, paintOne, paintOwners, type Rgb, rgbOf } from "../../draw/paint_bands";
import { colorVariable, type Palette, readPalette } from "../../draw/palette";
import { linear, type Scale } from "../../draw/scale";
import { columnStart } from "../../draw/stack";
import { prepare } from "../../draw/surface";
import { unitFor, withUnit } from "../../state/bytes";

export const TOP = 6;
const AXIS = 34;

/** Where the plot of a picture this high ends. */
export function bottomOf(height: number): number {
  return height - AXIS;
}

/** How much higher than the highest moment the picture is. */
export const ROOM = 1.1;
const LIFE = 5;

export interface Picture {
  answer: BandsAnswer;
  owners: Owners;
  top: number;
  x: Scale;
  width: number;
  height: number;
  axis: Axis;
  origin: number;
  color: string;
}

export function paintBands(canvas: HTMLCanvasElement, picture: Picture): void {
  const { answer, owners, top, x, width, height } = picture;
  const bottom = bottomOf(height);
  const context = prepare(canvas, { width, height });
  if (!context) return;
  const palette = readPalette(canvas, context);
  const y = linear([0, top], [bottom, TOP]);
  const [left, right] = x.range;
  const unit = unitFor(answer.peak.bytes);
  drawByteAxis(context, y, left, right, unit, palette);
  picture.axis.draw(context, x, bottom + LIFE + 3, answer.over === "event" ? answer.t0 : picture.origin, palette);
  within(context, picture, () => {
    draw(context, sheetOf(owners, answer, colorsOf(canvas, picture)), picture, bottom);
    drawTop(context, answer, x, y, palette);
  });
  const at = { x: x(peakOf(answer)), y: y(answer.peak.bytes) };
  if (at.x >= left - 1 && at.x <= right + 1) drawPeak(context, at, bottom, withUnit(answer.peak.bytes, unit), palette, right);
}

/** What is pointed at and what was kept, on a canvas of its own: the bands need not be painted anew. */
export function paintMarks(
  canvas: HTMLCanvasElement,
  picture: Picture,
  marks: { hovered: number; selected: number; life: AllocationAnswer | undefined },
): void {
  const { answer, owners, x, width, height } = picture;
  const bottom = bottomOf(height);
  const context = prepare(canvas, { width, height });
  if (!context) return;
  const palette = readPalette(canvas, context);
  const line = rgbOf(palette.text);
  within(context, picture, () => {
    if (marks.selected >= 0) draw(context, sheet(paintOne(owners, marks.selected, line, 110)), picture, bottom);
    if (marks.hovered !== NOTHING && marks.hovered !== marks.selected)
      draw(context, sheet(paintOne(owners, marks.hovered, line, 70)), picture, bottom);
  });
  if (!marks.life) return;
  const [from, to] =
    answer.over === "event"
      ? [marks.life.born_event ?? answer.t0, marks.life.freed_event ?? answer.t1]
      : [marks.life.first_ns, marks.life.last_ns];
  const [left, right] = x.range;
  const a = Math.min(Math.max(x(from), left), right);
  const b = Math.min(Math.max(x(to), left), right);
  if (x(to) < left || x(from) > right) return;
  context.fillStyle = palette.accent;
  context.fillRect(a, bottom + 2, Math.max(2, b - a), LIFE);
}

/** What lies outside the plot is not drawn: the bands may be of another stretch than the one that is shown. */
function within(context: CanvasRenderingContext2D, { x, height }: Picture, paint: () => void): void {
  const [left, right] = x.range;
  context.save();
  context.beginPath();
  context.rect(left, 0, right - left, bottomOf(height));
  context.clip();
  paint();
  context.restore();
}

/** The bands are painted in their own pixels, and laid into the plot where their stretch is. */
function draw(context: CanvasRenderingContext2D, bands: HTMLCanvasElement, { answer, x }: Picture, bottom: number): void {
  const [from, to] = [x(answer.t0), x(answer.t1)];
  context.imageSmoothingEnabled = false;
  context.drawImage(bands, from, TOP, to - from, bottom - TOP);
}

const painted = new WeakMap<Owners, { colors: string; bands: HTMLCanvasElement }>();

/** Painted once for every answer and theme: zooming and dragging only move it. */
function sheetOf(owners: Owners, answer: BandsAnswer, colors: BandColors): HTMLCanvasElement {
  const key = JSON.stringify(colors);
  const known = painted.get(owners);
  if (known?.colors === key) return known.bands;
  const bands = sheet(paintOwners(owners, answer, colors));
  painted.set(owners, { colors: key, bands });
  return bands;
}

function sheet(image: ImageData): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d")?.putImageData(image, 0, 0);
  return canvas;
}

function drawTop(context: CanvasRenderingContext2D, answer: BandsAnswer, x: Scale, y: Scale, palette: Palette): void {
  context.globalAlpha = 0.7;
  strokeSteps(context, columnEdges(answer, x), answer.max, y, palette.outline, 1);
  context.globalAlpha = 1;
}

/** Where the peak is, within its column. */
function peakOf(answer: BandsAnswer): number {
  const { over, peak } = answer;
  const at = over === "event" ? peak.event : peak.time_ns;
  return Math.max(columnStart(answer, peak.column), Math.min(at, columnStart(answer, peak.column + 1)));
}

function colorsOf(canvas: HTMLCanvasElement, { answer, color }: Picture): BandColors {
  const style = getComputedStyle(canvas);
  const known = new Map<string, Rgb>();
  const read = (name: string): Rgb => {
    const found = known.get(name) ?? rgbOf(style.getPropertyValue(name).trim() || "#888");
    known.set(name, found);
    return found;
  };
  return {
    keys: answer.keys.map((part, i) => {
      const name = colorVariable(color, part.key, i);
      return name === "--cat-unknown" ? null : read(name);
    }),
    unknown: read("--cat-unknown"),
    ground: read("--card"),
    edge: read("--text"),
  };
}
