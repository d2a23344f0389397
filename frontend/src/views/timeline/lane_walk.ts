/** From span to span of the lanes by keyboard. */
import type { Span } from "../../api/types";
import type { Lane } from "../../draw/lanes";

export interface Hit {
  lane: Lane;
  span: Span;
}

/** A lane by its place from the top, and a span by when it began: lanes are fetched anew at every zoom. */
export interface Walked {
  lane: number;
  start: number;
}

/** The span that is walked to; null where it is no longer shown. */
export function spanIn(lanes: readonly Lane[], { lane, start }: Walked): Hit | null {
  const row = lanes[lane];
  const span = row?.spans.find((one) => one.start_ns === start);
  return row && span ? { lane: row, span } : null;
}

/** Where an arrow key leads: along a lane, or to the nearest span of the lane above or below. Null for other keys. */
export function walk(lanes: readonly Lane[], from: Walked | null, key: string, window: readonly [number, number]): Walked | null {
  const along = { ArrowRight: 1, ArrowLeft: -1 }[key] ?? 0;
  const down = { ArrowDown: 1, ArrowUp: -1 }[key] ?? 0;
  if ((along === 0 && down === 0) || lanes.length === 0) return null;
  const now = from && spanIn(lanes, from);
  if (!from || !now) return nearest(lanes, 0, window[0]);
  const place = now.lane.spans.indexOf(now.span) + along;
  const next = now.lane.spans[place];
  if (along !== 0) return next && next.start_ns < window[1] && next.end_ns > window[0] ? { lane: from.lane, start: next.start_ns } : from;
  return nearest(lanes, from.lane + down, Math.max(window[0], from.start)) ?? from;
}

function nearest(lanes: readonly Lane[], lane: number, time: number): Walked | null {
  const spans = lanes[lane]?.spans ?? [];
  const span = spans.find((one) => one.end_ns > time) ?? spans.at(-1);
  return span ? { lane, start: span.start_ns } : null;
}
