/** Puts the timeline's canvases together from the drawing parts. */
import type { CurveAnswer } from "../../api/types";
import { drawFailed, drawLayers, drawOutline, drawPeak, drawReserved, outlinedText } from "../../draw/area";
import { type Axis, drawByteAxis, TIME_AXIS } from "../../draw/axes";
import { drawLanes, type Lane, lanesHeight } from "../../draw/lanes";
import { type Palette, readPalette } from "../../draw/palette";
import { linear, type Scale } from "../../draw/scale";
import { ceiling, highestReserve } from "../../draw/stack";
import { prepare } from "../../draw/surface";
import { unitFor, withUnit } from "../../state/bytes";

/** A request that failed, and where on the axis. */
export interface Failed {
  place: number;
  bytes: number;
}

interface Picture {
  by: string;
  curve: CurveAnswer;
  strip: CurveAnswer | undefined;
  x: Scale;
  width: number;
  height: number;
  /** Whether the picture is high enough for the reserve. */
  reserve: boolean;
  whole: [number, number];
  peakBytes: number;
  peakPlace: number | undefined;
  axis?: Axis;
  failed?: Failed[];
}

const AXIS = 26;

export function paintCurve(canvas: HTMLCanvasElement, picture: Picture): void {
  const { x, width, height } = picture;
  const context = prepare(canvas, { width, height });
  if (!context) return;
  const palette = readPalette(canvas, context);
  const bottom = height - AXIS;
  const curve = picture.reserve ? picture.curve : { ...picture.curve, reserved: null };
  const both = picture.strip ? [picture.curve, picture.strip] : [picture.curve];
  const top = ceiling(picture.reserve ? both : both.map((one) => ({ ...one, reserved: null })));
  const y = linear([0, top], [bottom, 6]);
  const [left, right] = x.range;
  const unit = unitFor(picture.peakBytes);
  drawByteAxis(context, y, left, right, unit, palette);
  (picture.axis ?? TIME_AXIS).draw(context, x, bottom, picture.whole[0], palette);
  context.save();
  context.beginPath();
  context.rect(left, 0, right - left, bottom);
  context.clip();
  drawLayers(context, curve, picture.by, { x, y }, palette);
  drawOutline(context, curve, { x, y }, palette);
  drawReserved(context, curve, { x, y }, palette);
  context.restore();
  const at = { x: x(picture.peakPlace ?? -Infinity), y: y(picture.peakBytes) };
  if (picture.reserve) labelReserved(context, curve, y, x.range, at.x, palette);
  else labelAbove(context, highestReserve(both), x.range, at.x, palette);
  if (at.x >= left && at.x <= right)
    drawPeak(context, at, bottom, withUnit(picture.peakBytes, unit), palette, right);
  const failed = (picture.failed ?? []).map((one) => ({ x: x(one.place), bytes: one.bytes }));
  drawFailed(context, failed, bottom - 10, [6, bottom], palette, x.range);
}

function labelReserved(
  context: CanvasRenderingContext2D,
  curve: CurveAnswer,
  y: Scale,
  [left, right]: Scale["range"],
  peak: number,
  palette: Palette,
): void {
  const atLeft = peak > right - 240; // the peak's own label stands at the right
  const reserved = curve.reserved ?? [];
  const level = atLeft ? Math.max(...reserved) : reserved.at(-1);
  if (level === undefined || reserved.length === 0) return;
  const words = atLeft && reserved[0] !== level ? "reserved up to" : "reserved";
  context.font = "11px system-ui, sans-serif";
  const align = atLeft ? "left" : "right";
  outlinedText(context, `${words} ${withUnit(level)}`, atLeft ? left + 4 : right - 4, Math.max(12, y(level) - 6), palette.muted, palette, align);
}

/** The reserve as a number where it would leave no room for what is allocated. */
export function labelAbove(
  context: CanvasRenderingContext2D,
  level: number,
  [left, right]: Scale["range"],
  peak: number,
  palette: { muted: string },
): void {
  if (level === 0) return;
  const atLeft = peak > right - 240;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = atLeft ? "left" : "right";
  context.fillStyle = palette.muted;
  context.fillText(`↑ reserved ${withUnit(level)}, not drawn`, atLeft ? left + 4 : right - 4, 14);
  context.textAlign = "left";
}

export function paintLanes(canvas: HTMLCanvasElement, rows: Lane[], x: Scale, width: number): void {
  const context = prepare(canvas, { width, height: lanesHeight(rows) });
  if (context) drawLanes(context, rows, x, readPalette(canvas, context));
}
