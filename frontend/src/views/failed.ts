import type { OomReport } from "../api/allocator";
import { useRemote } from "../api/remote";
import { address } from "../api/request";
import type { StepPeaks } from "../api/types";
import type { Pick } from "../state/selection";

/** The requests that failed in these steps. Devices without a reserve are not asked. */
export function useFailed(pick: Pick, stats: StepPeaks | undefined, steps: readonly number[]): OomReport[] {
  const asks = stats !== undefined && stats.peak_reserved_bytes !== null;
  const answer = useRemote<{ reports: OomReport[] }>(asks ? address("allocator_oom", { ...pick }) : null);
  return answer.data?.reports.filter((report) => steps.includes(report.step)) ?? [];
}
