/** Steps, phases and module calls as lanes under the curve, on the same time axis. */
import type { LanesAnswer, Span } from "../api/types";
import { categoryLabel } from "../state/categories";
import { cellText, moduleLabel } from "../state/names";
import type { Palette } from "./palette";
import type { Scale } from "./scale";
import { fitted } from "./surface";

type LaneKind = "step" | "phase" | "module";

export interface Lane {
  kind: LaneKind;
  label: string;
  spans: Span[];
  top: number;
  height: number;
}

const GAP = 3;
const HEIGHTS: Record<LaneKind, number> = { step: 18, phase: 20, module: 17 };
const DEEPEST = 8;

/** The lanes from the top, with the outermost `DEEPEST` depths of modules. */
export function laneRows(answer: LanesAnswer): Lane[] {
  const rows: [LaneKind, string, Span[]][] = [
    ["step", "steps", answer.steps],
    ["phase", "phases", answer.phases],
    ...answer.modules
      .slice(0, DEEPEST)
      .map((spans, depth): [LaneKind, string, Span[]] => ["module", depth === 0 ? (answer.label ?? "modules") : "", spans]),
  ];
  let top = 0;
  return rows
    .filter(([, , spans]) => spans.length > 0)
    .map(([kind, label, spans]) => {
      const lane = { kind, label, spans, top, height: HEIGHTS[kind] };
      top += HEIGHTS[kind] + GAP;
      return lane;
    });
}

export function lanesHeight(lanes: Lane[]): number {
  const last = lanes.at(-1);
  return last ? last.top + last.height : 0;
}

/** The span under a point, found by bisection: spans of a lane do not overlap. */
export function spanAt(lanes: Lane[], y: number, time: number): { lane: Lane; span: Span } | null {
  const lane = lanes.find((l) => y >= l.top && y < l.top + l.height + GAP);
  if (!lane) return null;
  let low = 0;
  let high = lane.spans.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    const span = lane.spans[middle]!;
    if (time < span.start_ns) high = middle - 1;
    else if (time >= span.end_ns) low = middle + 1;
    else return { lane, span };
  }
  return null;
}

export function spanLabel(kind: LaneKind, span: Span): string {
  if (kind === "module") return cellText(moduleLabel(span.name)) + (span.phase === "backward" ? " (backward)" : "");
  return kind === "phase" ? categoryLabel(cellText(span.name)) : cellText(span.name);
}

export function drawLanes(context: CanvasRenderingContext2D, lanes: Lane[], x: Scale, palette: Palette): void {
  for (const lane of lanes) {
    context.fillStyle = palette.muted;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillText(lane.label, x.range[0] - 8, lane.top + lane.height / 2 + 0.5);
    context.textAlign = "left";
    lane.spans.forEach((span, index) => drawSpan(context, lane, span, index, x, palette));
    lane.spans.forEach((_, index) => labelSpan(context, lane, index, x, palette));
  }
  context.textBaseline = "alphabetic";
}

function drawSpan(
  context: CanvasRenderingContext2D,
  lane: Lane,
  span: Span,
  index: number,
  x: Scale,
  palette: Palette,
): void {
  const left = Math.max(x.range[0], x(span.start_ns));
  const right = Math.min(x.range[1], x(span.end_ns));
  if (right <= left) return;
  const width = Math.max(0.75, right - left - (right - left > 3 ? 1 : 0));
  context.fillStyle =
    lane.kind === "phase" ? palette.phase(span.name) : lane.kind === "step" ? palette.lane : palette.call(index);
  if (width > 5) {
    context.beginPath();
    context.roundRect(left, lane.top, width, lane.height, 2.5);
    context.fill();
  } else context.fillRect(left, lane.top, width, lane.height);
}

/** Where a span can be read: its longest stretch that no later one in the lane lies on, as recomputed calls do. */
export function openStretch(spans: Span[], index: number): [number, number] {
  const span = spans[index]!;
  let [best, from]: [[number, number], number] = [[span.start_ns, span.start_ns], span.start_ns];
  const close = (to: number): void => {
    if (to - from > best[1] - best[0]) best = [from, to];
  };
  for (let at = index + 1; at < spans.length && spans[at]!.start_ns < span.end_ns; at++) {
    close(Math.max(from, spans[at]!.start_ns));
    from = Math.max(from, spans[at]!.end_ns);
  }
  close(span.end_ns);
  return best;
}

function labelSpan(context: CanvasRenderingContext2D, lane: Lane, index: number, x: Scale, palette: Palette): void {
  const span = lane.spans[index]!;
  if (x(span.end_ns) - x(span.start_ns) < 24) return;
  const [from, to] = openStretch(lane.spans, index);
  const left = Math.max(x.range[0], x(from));
  const width = Math.min(x.range[1], x(to)) - left - 1;
  if (width < 24) return;
  context.font =
    lane.kind === "module"
      ? "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
      : "11px system-ui, sans-serif";
  const text = labelThatFits(context, lane.kind, span, width - 10);
  context.fillStyle = palette.laneText;
  if (text) context.fillText(text, left + 5, lane.top + lane.height / 2 + 0.5);
}

/** A module's whole name, else its end, which tells it from its siblings, else what fits of it. */
function labelThatFits(context: CanvasRenderingContext2D, kind: LaneKind, span: Span, width: number): string {
  const whole = spanLabel(kind, span);
  if (kind !== "module" || context.measureText(whole).width <= width) return fitted(context, whole, width);
  const segments = cellText(moduleLabel(span.name)).split(".");
  for (let from = 0; from < Math.min(12, segments.length); from++) {
    const end = segments.slice(from).join(".");
    if (context.measureText(end).width <= width) return end;
  }
  return fitted(context, segments.at(-1) ?? "", width);
}
