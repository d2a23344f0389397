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
  const [from, to] = over === "event" ? [e0, e1] : [t0, t1];
  const [a, b] = [Math.round(Number(from)), Math.round(Number(to))];
  return from !== undefined && to !== undefined && b > a ? [a, b] : undefined;
}

/** The same for the address; null for everything. */
export function zoomPatch(over: Over, zoom: Stretch | null): RoutePatch {
  const [a, b] = zoom ? [String(zoom[0]), String(zoom[1])] : [undefined, undefined];
  return over === "event" ? { e0: a, e1: b } : { t0: a, t1: b };
}

/** All of a step or window; over events not known until the server has told which are its first and last. */
export function wholeOf(
  over: Over,
  from: number,
  to: number,
  told: { t0: number; t1: number; first_event?: number; last_event?: number } | undefined,
): Stretch | undefined {
  if (over === "time") return [from, to];
  if (told?.first_event === undefined || told.last_event === undefined) return undefined;
  return told.first_event < 0 ? [told.t0, told.t1] : [told.first_event, told.last_event + 1];
}
