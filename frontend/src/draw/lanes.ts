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
export const DEEPEST = 8;

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
    context.font = lane.kind === "module" ? MODULE_FONT : "11px system-ui, sans-serif";
    context.fillStyle = palette.laneText;
    for (const [text, left] of labelsOf(context, lane, x)) context.fillText(text, left, lane.top + lane.height / 2 + 0.5);
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

interface Label {
  left: number;
  room: number;
  whole: string;
  /** Of a module: the parts of its name, else none. */
  segments: string[];
  /** Alike for layers of one kind. */
  kind: string;
}

type Pen = Pick<CanvasRenderingContext2D, "measureText">;

const MODULE_FONT = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
const LEAST_ROOM = 24;
const MOST_SEGMENTS = 12;

/** What a lane's spans say, and where. Layers of one kind lose as much of their names, so that they read alike. */
export function labelsOf(pen: Pen, lane: Lane, x: Scale): [text: string, left: number][] {
  const labels = lane.spans.flatMap((_, index) => labelOf(lane, index, x) ?? []);
  const cuts = new Map<string, number>();
  for (const { room, segments, kind } of labels) {
    const cut = segments.findIndex((_, from) => fits(pen, segments.slice(from).join("."), room));
    if (cut >= 0) cuts.set(kind, Math.max(cut, cuts.get(kind) ?? 0));
  }
  return labels.map((label) => [textOf(pen, label, cuts.get(label.kind) ?? MOST_SEGMENTS), label.left + 5]);
}

/** Null where there is no room. */
function labelOf(lane: Lane, index: number, x: Scale): Label | null {
  const span = lane.spans[index]!;
  if (x(span.end_ns) - x(span.start_ns) < LEAST_ROOM) return null;
  const [from, to] = openStretch(lane.spans, index);
  const left = Math.max(x.range[0], x(from));
  const width = Math.min(x.range[1], x(to)) - left - 1;
  if (width < LEAST_ROOM) return null;
  const name = lane.kind === "module" ? cellText(moduleLabel(span.name)) : "";
  const segments = name === "" ? [] : name.split(".").slice(-MOST_SEGMENTS);
  const kind = `${span.phase} ${span.name.replace(/[0-9]+/g, "*")}`;
  return { left, room: width - 10, whole: spanLabel(lane.kind, span), segments, kind };
}

/** A module's whole name, else its end, which tells it from its siblings, else what fits of it. */
function textOf(pen: Pen, { whole, room, segments }: Label, cut: number): string {
  if (segments.length === 0 || (cut === 0 && fits(pen, whole, room))) return fitted(pen, whole, room);
  const end = segments.slice(cut).join(".");
  return end !== "" && fits(pen, end, room) ? end : fitted(pen, segments.at(-1)!, room);
}

function fits(pen: Pen, text: string, room: number): boolean {
  return pen.measureText(text).width <= room;
}
