/** The pictures of the Compare view. */
import type { CurveAnswer } from "../../api/types";
import { drawLayers, drawLine, drawOutline, drawPeak, drawReserved } from "../../draw/area";
import { drawByteAxis, drawTimeAxis } from "../../draw/axes";
import { type Palette, readPalette } from "../../draw/palette";
import { linear, type Scale } from "../../draw/scale";
import { ceiling, highestReserve, reserveFits } from "../../draw/stack";
import { prepare } from "../../draw/surface";
import { type Unit, withUnit } from "../../state/bytes";
import { labelAbove } from "../timeline/paint";

export const SIDE_HEIGHT = 240;
const LEFT = 74;
const BOTTOM = SIDE_HEIGHT - 24;

/** One step's stack; the scale holds both steps, so that heights can be compared. */
export function paintSide(
  canvas: HTMLCanvasElement,
  width: number,
  curve: CurveAnswer,
  both: CurveAnswer[],
  unit: Unit,
): void {
  const context = prepare(canvas, { width, height: SIDE_HEIGHT });
  if (!context) return;
  const palette = readPalette(canvas, context);
  const x = linear([curve.t0, curve.t1], [LEFT, width - 6]);
  const reserve = reserveFits(both);
  const y = linear([0, ceiling(reserve ? both : both.map((one) => ({ ...one, reserved: null })))], [BOTTOM, 6]);
  const longest = Math.max(...both.map(({ t0, t1 }) => t1 - t0));
  axes(context, x, y, curve.t0, unit, palette, longest);
  drawLayers(context, curve, "category", { x, y }, palette);
  drawOutline(context, curve, { x, y }, palette);
  if (reserve) drawReserved(context, curve, { x, y }, palette);
  else labelAbove(context, highestReserve([curve]), x.range, x(curve.peak.time_ns), palette);
  const at = { x: x(curve.peak.time_ns), y: y(curve.peak.bytes) };
  drawPeak(context, at, BOTTOM, withUnit(curve.peak.bytes, unit), palette, width - 6);
}

/** Both steps as lines, by time since each began: the base dashed, the picked one solid and filled below. */
export function paintOver(
  canvas: HTMLCanvasElement,
  width: number,
  base: CurveAnswer,
  other: CurveAnswer,
  unit: Unit,
): void {
  const context = prepare(canvas, { width, height: SIDE_HEIGHT });
  if (!context) return;
  const palette = readPalette(canvas, context);
  const [a, b] = [sinceStart(base), sinceStart(other)];
  const x = linear([0, Math.max(a.t1, b.t1)], [LEFT, width - 6]);
  const y = linear(
    [
      0,
      ceiling([
        { ...a, reserved: null },
        { ...b, reserved: null },
      ]),
    ],
    [BOTTOM, 6],
  );
  axes(context, x, y, 0, unit, palette);
  drawLine(context, a, x, y, palette.reserved, [5, 4]);
  drawLine(context, b, x, y, palette.accent, []);
  const peak = a.peak.bytes > b.peak.bytes ? a.peak : b.peak;
  drawPeak(
    context,
    { x: x(peak.time_ns), y: y(peak.bytes) },
    BOTTOM,
    withUnit(peak.bytes, unit),
    palette,
    width - 6,
  );
}

function sinceStart(curve: CurveAnswer): CurveAnswer {
  return { ...curve, t0: 0, t1: curve.t1 - curve.t0, peak: { ...curve.peak, time_ns: curve.peak.time_ns - curve.t0 } };
}

function axes(
  context: CanvasRenderingContext2D,
  x: Scale,
  y: Scale,
  origin: number,
  unit: Unit,
  palette: Palette,
  longest?: number,
): void {
  drawByteAxis(context, y, LEFT, x.range[1], unit, palette);
  drawTimeAxis(context, x, BOTTOM, origin, palette, longest);
}
