/** The cursor of the timeline: where the pointer hovers, else where it was pinned, else the peak. */
import { useRef, useState } from "preact/hooks";
import { type Remote, useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { CurveAnswer, MomentAnswer, Over } from "../../api/types";
import { columnAt, columnParts } from "../../draw/stack";
import { navigate, route } from "../../state/app";
import type { Pick } from "../../state/selection";

export interface Cursor {
  /** Place on the axis under the cursor; undefined until it is known. */
  place: number | undefined;
  hovering: boolean;
  atPeak: boolean;
  pinned: boolean;
  /** Whether it rests at the highest moment of what is zoomed to. */
  atHighest: boolean;
  /** Of folded modules, how many a key stands for, and whether it can be opened. */
  groups: Map<string, { modules: number; opens: boolean }>;
  /** The exact state, once the server has answered. */
  moment: Remote<MomentAnswer>;
  /** How modules are folded, as the server is asked. */
  folding: { fold?: string; open?: string | undefined };
  /** Where the state at the peak is asked for, divided as the cursor's is; null until it is known when that was. */
  peakPath: string | null;
  /** The moment that the cursor's is held against: null where none is marked. */
  mark: { event: number; place: number | undefined; moment: Remote<MomentAnswer> } | null;
  /** Marks the cursor's moment, or forgets the mark; does nothing while the moment is not known. */
  flipMark: () => void;
  /** The curve's own column under the cursor: shown at once, until the exact state is there. */
  approximate: { key: string; label: string; bytes: number }[];
  hover: (place: number | undefined) => void;
  pin: (place: number | undefined) => void;
  /** To the peak, wherever it is. */
  toPeak: () => void;
  /** One event further (+1) or back (-1). */
  step: (by: 1 | -1) => void;
}

/** What of a query may differ for an old moment to stay on show. */
const SAME_STEP = ["t", "event", "open", "fold", "since"];

interface Drawn {
  pick: Pick;
  /** What the peak is one of: a step, or all of a window. */
  of: string;
  over: Over;
  by: string;
  folding: Cursor["folding"];
  curve: CurveAnswer | undefined;
  /** All of it, whatever the zoom. */
  whole: CurveAnswer | undefined;
  /** The highest moment of what is zoomed to; undefined where all is shown, or while it is not known. */
  highest: Moment | undefined;
  /** Without the side file: then there are no moments. */
  coarse: boolean;
}

function labeled(curve: CurveAnswer, column: number): Cursor["approximate"] {
  return columnParts(curve, column).map((part, k) => ({ ...part, label: curve.labels?.[k] ?? part.key }));
}

export function useCursor(drawn: Drawn, onReached: (place: number) => void): Cursor {
  const { pick, of, over, by, folding, curve, whole, highest, coarse } = drawn;
  const [hovered, setHovered] = useState<number | undefined>(undefined);
  const peak = useRef<({ of: string } & Moment) | undefined>(undefined);
  if (whole && peak.current?.of !== of) peak.current = { of, t: whole.peak.time_ns, event: whole.peak.event };
  const top = peak.current?.of === of ? peak.current : undefined;

  const pinned = momentIn(route.value);
  const free = pinned.t === undefined && pinned.event === undefined && hovered === undefined;
  const atHighest = free && highest !== undefined && highest.event !== top?.event;
  const isTop = top && !atHighest && (pinned.event === undefined ? pinned.t === undefined || pinned.t === top.t : pinned.event === top.event);
  const onPeak = hovered === undefined && (isTop ?? free);
  const pointed = hovered === undefined ? undefined : over === "event" ? { event: eventUnder(hovered, whole) } : { t: hovered };
  const wanted: Moment | undefined = pointed ?? (atHighest ? highest : onPeak ? top : pinned);
  const queryOf = ({ t, event }: Moment, since?: number): string =>
    address("moment", { ...pick, ...(event !== undefined ? { event } : { t: Math.round(t ?? 0) }), by, ...folding, since });
  const marked = coarse ? undefined : momentIn({ event: route.value.mark }).event;
  const ofMark = useRemote<MomentAnswer>(marked === undefined ? null : queryOf({ event: marked }));
  const since = ofMark.failure ? undefined : marked;
  const moment = useRemote<MomentAnswer>(wanted && !coarse ? queryOf(wanted, since) : null, hovered === undefined ? 0 : 90, SAME_STEP);
  const found = moment.data && { t: moment.data.time_ns, event: moment.data.event };
  const place = hovered ?? (wanted && (placeOf(wanted, over) ?? (found && placeOf(found, over))));

  return {
    place,
    hovering: hovered !== undefined,
    atPeak: top !== undefined && (onPeak || moment.data?.event === top.event) && hovered === undefined,
    atHighest,
    pinned: pinned.t !== undefined || pinned.event !== undefined,
    moment,
    folding,
    peakPath: top && !coarse ? queryOf(top) : null,
    mark:
      since === undefined
        ? null
        : { event: since, place: placeOf({ t: ofMark.stale ? undefined : ofMark.data?.time_ns, event: since }, over), moment: ofMark },
    flipMark: () => {
      const now = moment.stale ? undefined : moment.data?.event;
      if (marked !== undefined) navigate({ mark: undefined });
      else if (now !== undefined) navigate({ mark: String(now) });
    },
    groups: new Map(curve?.groups?.map((group, k) => [curve.keys[k]!, group])),
    approximate: curve && place !== undefined ? labeled(curve, columnAt(curve, place)) : [],
    hover: setHovered,
    pin: (at) =>
      navigate(
        at !== undefined && over === "event"
          ? { t: undefined, event: String(eventUnder(at, whole)) }
          : { t: at === undefined ? undefined : String(Math.round(at)), event: undefined },
      ),
    toPeak: () => {
      if (!top) return;
      navigate({ t: String(top.t), event: String(top.event) });
      onReached(placeOf(top, over)!);
    },
    step: (way) => {
      const now = moment.data;
      if (!now || moment.stale) return;
      const [t, event] =
        way > 0 ? [now.next_event_ns, now.next_event] : [now.previous_event_ns, now.previous_event];
      if (t === null || event === null) return;
      setHovered(undefined);
      navigate({ t: String(t), event: String(event) });
      onReached(placeOf({ t, event }, over)!);
    },
  };
}

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

type Whole = Omit<Partial<CurveAnswer>, "peak"> & { peak: { event: number } };
