/** Rows of a long list, asked for page by page as they come into sight. */
import { address, type Query } from "../../api/request";
import { type Remote, useRemote } from "../../api/remote";
import type { AllocationsAnswer, Listed } from "../../api/types";
import type { InSight } from "../windowed";

export const PAGE = 200;

/** What of a query may differ for old rows to stay on show: the page, the search, the order and the zoom. */
const SAME_STEP = ["first", "find", "sort", "t0", "t1", "over"];

export interface Pages {
  /** The newest answer of any page: counts and sums are the same in all. */
  any: Remote<AllocationsAnswer>;
  at: (index: number) => Listed | undefined;
}

/** A screen of rows lies within two pages at most. */
export function usePages(query: Query, sight: Pick<InSight, "first" | "last">, wait: number): Pages {
  const low = Math.floor(sight.first / PAGE) * PAGE;
  const high = Math.floor(Math.max(sight.first, sight.last - 1) / PAGE) * PAGE;
  const path = (first: number): string => address("allocations", { ...query, first, count: PAGE });
  const one = useRemote<AllocationsAnswer>(path(low), wait, SAME_STEP);
  const two = useRemote<AllocationsAnswer>(high === low ? null : path(high), wait, SAME_STEP);
  return {
    any: one,
    at: (index) => {
      for (const page of [one, two]) {
        const row = page.data && !page.stale ? page.data.rows[index - page.data.first] : undefined;
        if (row && page.data && index >= page.data.first) return row;
      }
      return undefined;
    },
  };
}
