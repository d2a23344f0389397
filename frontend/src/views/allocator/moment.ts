/** The moment that the view shows: what the address says, else the failed request, else the peak. */
import { address } from "../../api/request";
import { type Remote, useRemote } from "../../api/remote";
import type { AllocatorState, FailedRequest, Over, ReserveCurve } from "../../api/types";
import { navigate, route } from "../../state/app";
import type { Stretch } from "../../state/stretch";

export interface ShownMoment {
  /** The query that names it, once it is known. */
  query: { event: number } | { t: number } | null;
  state: Remote<AllocatorState>;
  failed: FailedRequest | undefined;
  atPeak: boolean;
  /** To a place of the chart's axis. */
  scrub: (over: Over, at: number) => void;
  show: (event: number, time: number) => void;
  reset: () => void;
  step: (by: 1 | -1) => void;
}

export function useMoment(pick: Stretch["query"], curve: ReserveCurve | undefined): ShownMoment {
  const failed = curve?.ooms.find((one) => pick.span === "window" || one.step === pick.step);
  const { event, t } = route.value;
  const chosen = event !== undefined ? { event: whole(event) } : t !== undefined ? { t: whole(t) } : null;
  const first = failed?.event ?? curve?.peak.event;
  const query = chosen ?? (first === undefined ? null : { event: first });
  const state = useRemote<AllocatorState>(query && address("allocator", { ...pick, ...query }), 0, SAME_WINDOW);
  const show = (at: number, time: number): void => navigate({ t: String(time), event: String(at) });
  return {
    query,
    state,
    failed,
    atPeak: state.data !== undefined && state.data.event === curve?.peak.event,
    scrub: (over, at) =>
      navigate(
        over === "event"
          ? { event: String(Math.max(-1, Math.floor(at))), t: undefined }
          : { t: String(Math.round(at)), event: undefined },
      ),
    show,
    reset: () => navigate({ event: undefined, t: undefined }),
    step: (by) => {
      const now = state.data;
      if (!now || state.stale) return;
      const [at, time] = by > 0 ? [now.next_event, now.next_event_ns] : [now.previous_event, now.previous_event_ns];
      if (at !== null && time !== null) show(at, time);
    },
  };
}

/** What of a query may differ for an old answer to stay on show: the moment, and how it is drawn. */
export const SAME_WINDOW = ["t", "event", "t0", "t1", "px", "first", "last", "finest", "over", "by", "order"];

function whole(text: string): number {
  const number = Math.round(Number(text));
  return Number.isFinite(number) ? number : 0;
}
