import { OUT_OF_MEMORY } from "../../api/contract";
import type { Note, StepStats } from "../../api/types";
import type { Pick } from "../../state/selection";
import { exactBytes, withUnit } from "../../state/bytes";
import { duration } from "../../state/time";
import { grouped } from "../../state/numbers";
import { CAUSES } from "../allocator/sentences";
import type { Failure } from "../failed";
import { Notice } from "../notices";
import { RouteLink } from "../route_link";

/** Without the notes that say the same of this device; those of other devices stay. */
export function withoutFailures(notes: Note[], { device }: Pick, failed: Failure[]): Note[] {
  return failed.length === 0 ? notes : notes.filter((note) => note.code !== OUT_OF_MEMORY || note.device !== device);
}

/** Where a request failed in this step, that comes before all numbers. */
export function OutOfMemory({ failed, stats }: { failed: Failure[]; stats: StepStats }) {
  const [first] = failed;
  if (!first) return null;
  const why = CAUSES[first.cause ?? ""];
  return (
    <div class="over-cards">
      <Notice level="warning" testid="out-of-memory">
        Out of memory {duration(first.time_ns - stats.step_start_ns)} after the start: a request of{" "}
        <strong title={exactBytes(first.requested_bytes)}>{withUnit(first.requested_bytes)}</strong> failed
        {why && <>, because {why}</>}
        {failed.length > 1 && <>, and {grouped(failed.length - 1)} more after it</>}.{" "}
        <RouteLink to={{ view: "allocator", t: String(first.time_ns), event: String(first.event) }}>
          What there was, and why it did not fit
        </RouteLink>
      </Notice>
    </div>
  );
}
