/** Whose stacks are shown: what was alive at a moment, by default the peak, or all that the step allocated. */
import { route } from "../../state/app";

export interface Choice {
  of: "moment" | "step";
  /** Whether the moment is one that the address names. */
  chosen: boolean;
  /** The query of the API's routes. */
  query: Record<string, string>;
}

export function choice(): Choice {
  const { of, event, t } = route.value;
  if (of === "step") return { of, chosen: false, query: { of } };
  if (event !== undefined && whole(event) !== null) return { of: "moment", chosen: true, query: { event: whole(event)! } };
  if (t !== undefined && whole(t) !== null) return { of: "moment", chosen: true, query: { t: whole(t)! } };
  return { of: "moment", chosen: false, query: {} };
}

function whole(text: string): string | null {
  const number = Math.round(Number(text));
  return Number.isSafeInteger(number) ? String(number) : null;
}

/** What of a query may differ for an old answer to stay on show: everything but whose stacks these are. */
export const SAME_RUN = ["step", "t", "event", "of", "px", "node", "frames", "find", "sort", "first", "count", "rules"];
