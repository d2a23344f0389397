import type { FailedRequest, FailedRequests, StepPeaks } from "../api/types";
import { useRemote } from "../api/remote";
import { address } from "../api/request";
import type { Pick } from "../state/selection";

/** A failed request, and its cause if that is reported. */
export interface Failure extends FailedRequest {
  cause: string | undefined;
}

/** The requests that failed in these steps. Devices without a reserve are not asked. */
export function useFailed(pick: Pick, stats: StepPeaks | undefined, steps: readonly number[]): Failure[] {
  const asks = stats !== undefined && stats.peak_reserved_bytes !== null;
  const { data } = useRemote<FailedRequests>(asks ? address("allocator_oom", { ...pick }) : null);
  const causes = new Map(data?.reports.map((report) => [report.number, report.cause]));
  return (data?.ooms ?? [])
    .filter((failed) => steps.includes(failed.step))
    .map((failed) => ({ ...failed, cause: causes.get(failed.number) }));
}
