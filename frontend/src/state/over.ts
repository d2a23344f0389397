/** Charts that run over time or over events: which of both, how far they are zoomed, and what all of it is. */
import type { Over } from "../api/types";
import type { Route, RoutePatch } from "./route";

export const OVERS = [
  ["time", "Time"],
  ["event", "Event"],
] as const;

type Stretch = [number, number];

export function overOf({ over }: Route): Over {
  return over === "event" ? "event" : "time";
}

/** What the address zooms to on an axis, in whole nanoseconds or events; undefined where all is shown. */
export function zoomOf({ t0, t1, e0, e1 }: Route, over: Over): Stretch | undefined {
  return over === "event" ? rangeOf(e0, e1) : rangeOf(t0, t1);
}

/** The steps that a chart over steps is zoomed to, from the first to the last. */
export function stepsZoom({ s0, s1 }: Route): Stretch | undefined {
  return rangeOf(s0, s1);
}

function rangeOf(from: string | undefined, to: string | undefined): Stretch | undefined {
  const [a, b] = [Math.round(Number(from)), Math.round(Number(to))];
  return Number.isSafeInteger(a) && Number.isSafeInteger(b) && b > a ? [a, b] : undefined;
}

/** The same for the address; null for everything. */
export function zoomPatch(over: Over, zoom: Stretch | null): RoutePatch {
  const [a, b] = zoom ? [String(zoom[0]), String(zoom[1])] : [undefined, undefined];
  return over === "event" ? { e0: a, e1: b } : { t0: a, t1: b };
}

/** All of a step or window; over events not known until an answer says which are its first and last. */
export function wholeOf(
  over: Over,
  from: number,
  to: number,
  answer: { t0: number; t1: number; first_event?: number; last_event?: number } | undefined,
): Stretch | undefined {
  if (over === "time") return [from, to];
  if (answer?.first_event === undefined || answer.last_event === undefined) return undefined;
  return answer.first_event < 0 ? [answer.t0, answer.t1] : [answer.first_event, answer.last_event + 1];
}
