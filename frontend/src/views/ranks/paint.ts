/** Draws the heat map of ranks: cells, names at the left, steps below, and frames around single cells. */
import { columnLeft, type HeatLayout } from "../../draw/heat_map";
import type { Palette } from "../../draw/palette";
import { roundStep } from "../../draw/scale";

type Context = CanvasRenderingContext2D;

export interface Picture {
  layout: HeatLayout;
  /** One pixel a cell. */
  cells: HTMLCanvasElement;
  names: string[];
  /** Each column's steps, inclusive. */
  first: number[];
  last: number[];
  /** Whether nobody told steps apart. */
  alone: boolean;
  /** Pixels that are scrolled out above, and the height that cells have on show. */
  scrolled: number;
  shown: number;
  colors: Palette;
  missing: CanvasPattern | string;
}

const ROOMY = 7;
const LABEL = 14;

export function drawHeatMap(context: Context, picture: Picture): void {
  const { layout, shown } = picture;
  within(context, picture, layout.top, shown, () => drawCells(context, picture));
  within(context, picture, 0, layout.top + shown + layout.top, () => drawNames(context, picture));
  if (!picture.alone) drawSteps(context, picture);
}

/** Draws what is scrolled, clipped to a band of the canvas. */
function within(context: Context, { layout, scrolled }: Picture, top: number, height: number, draw: () => void): void {
  context.save();
  context.beginPath();
  context.rect(0, top, layout.left + layout.width + 6, height);
  context.clip();
  context.translate(0, -scrolled);
  draw();
  context.restore();
}

function drawCells(context: Context, picture: Picture): void {
  const { layout } = picture;
  context.fillStyle = picture.missing;
  context.fillRect(layout.left, layout.top, layout.width, layout.height);
  context.imageSmoothingEnabled = false;
  context.drawImage(picture.cells, layout.left, layout.top, layout.width, layout.height);
  drawGaps(context, picture);
}

/** Where cells are large enough, the ground shows between them. */
function drawGaps(context: Context, { layout, colors }: Picture): void {
  context.fillStyle = colors.ground;
  if (layout.rowHeight >= ROOMY)
    for (let row = 1; row < layout.rows; row++)
      context.fillRect(layout.left, layout.top + row * layout.rowHeight - 1, layout.width, 1);
  if (layout.width / layout.columns >= ROOMY)
    for (let column = 1; column < layout.columns; column++)
      context.fillRect(columnLeft(layout, column) - 1, layout.top, 1, layout.height);
}

function drawNames(context: Context, { layout, names, colors }: Picture): void {
  const every = Math.ceil(LABEL / layout.rowHeight);
  context.font = '11.5px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace';
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.fillStyle = colors.muted;
  for (let row = 0; row < layout.rows; row += every) {
    const y = layout.top + (row + 0.5) * layout.rowHeight;
    context.fillText(names[row] ?? "", layout.left - 8, y);
  }
  context.textAlign = "left";
}

/** Round steps, each under the column that holds it. */
function drawSteps(context: Context, { layout, first, last, shown, colors }: Picture): void {
  const [from, to] = [first[0]!, last.at(-1)!];
  const every = Math.max(1, roundStep(to - from, Math.max(1, Math.floor(layout.width / 64))));
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  context.textAlign = "center";
  context.fillStyle = colors.muted;
  const y = layout.top + shown + 6;
  const right = layout.left + layout.width;
  for (let step = Math.ceil(from / every) * every; step <= to; step += every) {
    const column = last.findIndex((end) => end >= step);
    if (first[column]! > step) continue;
    const x = (columnLeft(layout, column) + columnLeft(layout, column + 1)) / 2;
    const text = String(step);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(Math.max(x, layout.left + half), right - half), y);
  }
  context.textAlign = "left";
}

/** Around one cell, `out` pixels outside of it, with a halo, so that it stands out on every color. */
export function drawCell(
  context: Context,
  { layout, scrolled, shown, colors }: Picture,
  { row, column }: { row: number; column: number },
  line: string,
  out: number,
): void {
  const [x0, x1] = [columnLeft(layout, column), columnLeft(layout, column + 1)];
  const wide = Math.max(5, x1 - x0);
  const left = x0 + (x1 - x0 - wide) / 2;
  const high = Math.max(5, layout.rowHeight);
  const top = layout.top + (row + 0.5) * layout.rowHeight - high / 2 - scrolled;
  if (top + high < layout.top || top > layout.top + shown) return;
  for (const [color, width] of [
    [colors.ground, 4],
    [line, 2],
  ] as const) {
    context.strokeStyle = color;
    context.lineWidth = width;
    context.strokeRect(left - 0.5 - out, top - 0.5 - out, wide + 2 * out, high + 2 * out);
  }
}
