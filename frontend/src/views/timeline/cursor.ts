/** The cursor of the timeline: where the pointer hovers, else where it was pinned, else the peak. */
import { useRef, useState } from "preact/hooks";
import { address } from "../../api/request";
import { type Remote, useRemote } from "../../api/remote";
import type { CurveAnswer, MomentAnswer } from "../../api/types";
import { columnAt, columnParts } from "../../draw/stack";
import { navigate, route } from "../../state/app";
import type { Pick } from "../../state/selection";

export interface Cursor {
  /** Time under the cursor; undefined until the curve is there. */
  time: number | undefined;
  hovering: boolean;
  atPeak: boolean;
  pinned: boolean;
  /** Of folded modules, how many a key stands for, and whether it can be opened. */
  groups: Map<string, { modules: number; opens: boolean }>;
  /** The exact state, once the server has answered. */
  moment: Remote<MomentAnswer>;
  /** How modules are folded, as the server is asked. */
  folding: { fold?: string; open?: string | undefined };
  /** Where the state at the peak is asked for, divided as the cursor's is; null until it is known when that was. */
  peakPath: string | null;
  /** The curve's own column under the cursor: shown at once, until the exact state is there. */
  approximate: { key: string; label: string; bytes: number }[];
  hover: (time: number | undefined) => void;
  pin: (time: number | undefined) => void;
  /** One event further (+1) or back (-1). */
  step: (by: 1 | -1) => void;
}

function labelled(curve: CurveAnswer, column: number): Cursor["approximate"] {
  return columnParts(curve, column).map((part, k) => ({ ...part, label: curve.labels?.[k] ?? part.key }));
}

export function useCursor(
  pick: Pick,
  of: string,
  by: string,
  folding: { fold?: string; open?: string | undefined },
  curve: CurveAnswer | undefined,
  whole: CurveAnswer | undefined,
  coarse: boolean,
  onReached: (time: number) => void,
): Cursor {
  const [hovered, setHovered] = useState<number | undefined>(undefined);
  const [event, setEvent] = useState<{ of: string; index: number } | undefined>(undefined);
  const peak = useRef<{ of: string; time: number; event: number } | undefined>(undefined);
  if (whole && peak.current?.of !== of) peak.current = { of, time: whole.peak.time_ns, event: whole.peak.event };
  const pinnedTime = route.value.t === undefined ? undefined : Number(route.value.t);
  const top = peak.current?.of === of ? peak.current : undefined;

  const stepped = hovered === undefined && event?.of === of ? event.index : undefined;
  const onPeak =
    hovered === undefined && stepped === undefined && (pinnedTime === undefined || pinnedTime === top?.time);
  const query =
    stepped !== undefined
      ? { event: stepped }
      : onPeak
        ? top
          ? { event: top.event }
          : null
        : { t: Math.round(hovered ?? pinnedTime ?? 0) };
  const pathOf = (of: { event: number } | { t: number }): string => address("moment", { ...pick, ...of, by, ...folding });
  const path = query && !coarse ? pathOf(query) : null;
  const moment = useRemote<MomentAnswer>(path, hovered === undefined ? 0 : 90, (p) =>
    p.replace(/&(t|event|open|fold)=[^&]*/g, ""),
  );
  const time = hovered ?? (stepped !== undefined ? moment.data?.time_ns : onPeak ? top?.time : pinnedTime);
  const shownEvent = moment.data?.event;

  return {
    time,
    hovering: hovered !== undefined,
    atPeak: top !== undefined && (shownEvent === top.event || time === top.time) && hovered === undefined,
    pinned: pinnedTime !== undefined || stepped !== undefined,
    moment,
    folding,
    peakPath: top && !coarse ? pathOf({ event: top.event }) : null,
    groups: new Map(curve?.groups?.map((group, k) => [curve.keys[k]!, group])),
    approximate: curve && time !== undefined ? labelled(curve, columnAt(curve, time)) : [],
    hover: setHovered,
    pin: (at) => {
      setEvent(undefined);
      navigate({ t: at === undefined ? undefined : String(Math.round(at)) });
    },
    step: (by) => {
      const now = moment.data;
      if (!now || moment.stale) return;
      const [reached, index] =
        by > 0 ? [now.next_event_ns, now.next_event] : [now.previous_event_ns, now.previous_event];
      if (reached === null || index === null) return;
      setHovered(undefined);
      setEvent({ of, index });
      navigate({ t: String(reached) });
      onReached(reached);
    },
  };
}
