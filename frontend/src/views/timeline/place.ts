/** Where a moment stands on an axis of time or of events, and which event stands at a place. */
import type { CurveAnswer, Over } from "../../api/types";

/** A moment by its time, by its event, or both. */
export interface Moment {
  t?: number | undefined;
  event?: number | undefined;
}

/** The moment that an address names; what is no number names nothing. */
export function momentIn({ t, event }: { t?: string | undefined; event?: string | undefined }): Moment {
  return { t: numberIn(t), event: numberIn(event) };
}

function numberIn(text: string | undefined): number | undefined {
  const number = Number(text);
  return text !== undefined && Number.isFinite(number) ? Math.round(number) : undefined;
}

/** What follows event e is drawn from e to e + 1, so it stands between; undefined where the axis needs the one that is absent. */
export function placeOf({ t, event }: Moment, over: Over): number | undefined {
  return over === "time" ? t : event === undefined ? undefined : event + 0.5;
}

/** The event that a place on the axis of events belongs to, one of the curve's own; where it has none, the peak's. */
export function eventUnder(place: number, whole: Whole | undefined): number {
  const [first, last] = [whole?.first_event ?? 0, whole?.last_event ?? Infinity];
  return whole && last < 0 ? whole.peak.event : Math.min(Math.max(Math.floor(place), first), last);
}

type Whole = Pick<CurveAnswer, "first_event" | "last_event"> & { peak: { event: number } };
