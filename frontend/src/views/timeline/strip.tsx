import { useRef } from "preact/hooks";
import type { CurveAnswer } from "../../api/types";
import { columnEdges, drawLayers, drawOutline, drawReserved, fillBetween } from "../../draw/area";
import { across } from "../../draw/axes";
import { readPalette } from "../../draw/palette";
import { linear } from "../../draw/scale";
import { ceiling, kept, panned } from "../../draw/stack";
import { prepare } from "../../draw/surface";
import { usePaint, zoomedByKey } from "../canvas";

interface Props {
  curve: CurveAnswer | undefined;
  window: [number, number];
  whole: [number, number];
  width: number;
  enabled: boolean;
  /** The least that it zooms to. */
  least: number;
  /** What it is colored by, as the picture above; undefined: by nothing, since that has other colors. */
  by: string | undefined;
  reserve: boolean;
  onZoom: (window: [number, number]) => void;
}

const HEIGHT = 46;
const HANDLE = 6;

type Grip = { kind: "move" | "left" | "right" | "new"; time: number; window: [number, number] };

/** The whole step in a strip, with the shown window as a frame that can be moved and pulled. */
export function Strip({ curve, window, whole, width, enabled, least, by, reserve, onZoom }: Props) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const grip = useRef<Grip | null>(null);
  const x = across(whole, width);
  const drawn = curve && !reserve ? { ...curve, reserved: null } : curve;
  usePaint(canvas, drawn && ((to) => paintStrip(to, drawn, by, window, x, width)), [curve, by, width, reserve, ...window]);

  const down = (event: PointerEvent): void => {
    if (!enabled) return;
    const [a, b] = [x(window[0]), x(window[1])];
    const px = event.offsetX;
    const all = window[0] === whole[0] && window[1] === whole[1];
    const kind = all
      ? "new"
      : Math.abs(px - a) <= HANDLE
        ? "left"
        : Math.abs(px - b) <= HANDLE
          ? "right"
          : px > a && px < b
            ? "move"
            : "new";
    grip.current = { kind, time: x.invert(px), window };
    canvas.current?.setPointerCapture(event.pointerId);
  };
  const move = (event: PointerEvent): void => {
    const g = grip.current;
    if (!g) return;
    const t = x.invert(event.offsetX);
    if (g.kind === "move") onZoom(kept([g.window[0] + t - g.time, g.window[1] + t - g.time], whole));
    else {
      const fixed = g.kind === "left" ? g.window[1] : g.kind === "right" ? g.window[0] : g.time;
      if (Math.abs(t - fixed) > Math.max(least, (whole[1] - whole[0]) / 2000)) onZoom(clamped([Math.min(t, fixed), Math.max(t, fixed)], whole));
    }
  };
  const keys = (event: KeyboardEvent): void => {
    const next = zoomedByKey(event, window, whole, (window[0] + window[1]) / 2, least);
    if (next) onZoom(next);
    else if (event.key === "ArrowLeft") onZoom(panned(window, -0.1, whole));
    else if (event.key === "ArrowRight") onZoom(panned(window, 0.1, whole));
    else if (event.key === "Escape") onZoom(whole);
    else return;
    event.preventDefault();
  };
  return (
    <canvas
      ref={canvas}
      class="overview-strip brush"
      data-testid="overview-strip"
      tabIndex={enabled ? 0 : -1}
      role="application"
      aria-roledescription="chart"
      aria-label="The whole of it. Arrow keys move the shown window, plus and minus change its width, Escape shows everything."
      style={{ height: `${HEIGHT}px` }}
      onPointerDown={down}
      onPointerMove={move}
      onPointerUp={() => (grip.current = null)}
      onPointerCancel={() => (grip.current = null)}
      onDblClick={() => onZoom(whole)}
      onKeyDown={keys}
    />
  );
}

function clamped([a, b]: [number, number], whole: [number, number]): [number, number] {
  return [Math.round(Math.max(whole[0], a)), Math.round(Math.min(whole[1], b))];
}

function paintStrip(
  canvas: HTMLCanvasElement,
  curve: CurveAnswer,
  by: string | undefined,
  window: [number, number],
  x: ReturnType<typeof linear>,
  width: number,
): void {
  const context = prepare(canvas, { width, height: HEIGHT });
  if (!context) return;
  const palette = readPalette(canvas, context);
  const frame = { x, y: linear([0, ceiling([curve])], [HEIGHT - 1, 2]) };
  if (by !== undefined) drawLayers(context, curve, by, frame, palette);
  else fillBetween(context, columnEdges(curve, x), curve.max, curve.max.map(() => 0), frame.y, palette.lane);
  drawOutline(context, curve, frame, palette, false);
  drawReserved(context, curve, frame, palette);
  const [a, b] = [x(window[0]), x(window[1])];
  const [left, right] = x.range;
  context.globalAlpha = 0.66;
  context.fillStyle = palette.ground;
  context.fillRect(left, 0, a - left, HEIGHT);
  context.fillRect(b, 0, right - b, HEIGHT);
  context.globalAlpha = 1;
  context.strokeStyle = palette.accent;
  context.lineWidth = 1.5;
  context.strokeRect(a + 0.75, 0.75, Math.max(1, b - a - 1.5), HEIGHT - 1.5);
  context.fillStyle = palette.accent;
  for (const edge of [a, b]) context.fillRect(edge - (edge === a ? 0 : 4), HEIGHT / 2 - 8, 4, 16);
}
