import { address } from "../../api/request";
import type { OomReport } from "../../api/allocator";
import { useRemote } from "../../api/remote";
import type { StepStats } from "../../api/types";
import type { Pick } from "../../state/selection";
import { exactBytes, withUnit } from "../../state/bytes";
import { duration } from "../../state/time";
import { CAUSES } from "../allocator/sentences";
import { Notice } from "../notices";
import { RouteLink } from "../route_link";

/** Where a request failed in this step, that comes before all numbers. Devices without a reserve are not asked. */
export function OutOfMemory({ pick, stats }: { pick: Pick; stats: StepStats }) {
  const asks = stats.peak_reserved_bytes !== null;
  const answer = useRemote<{ reports: OomReport[] }>(asks ? address("allocator_oom", { ...pick }) : null);
  const failed = answer.data?.reports.filter((report) => report.step === pick.step) ?? [];
  const [first] = failed;
  if (!first) return null;
  const why = CAUSES[first.cause];
  return (
    <div class="over-cards">
      <Notice level="warning" testid="out-of-memory">
        Out of memory {duration(first.time_ns - stats.step_start_ns)} after the beginning: a request of{" "}
        <strong title={exactBytes(first.requested_bytes)}>{withUnit(first.requested_bytes)}</strong> failed
        {why && <>, because {why}</>}
        {failed.length > 1 && <>, and {failed.length - 1} more after it</>}.{" "}
        <RouteLink to={{ view: "allocator", t: String(first.time_ns), event: String(first.event) }}>
          What there was, and why it did not fit
        </RouteLink>
      </Notice>
    </div>
  );
}
