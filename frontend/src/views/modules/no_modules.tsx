import type { StepAnswer } from "../../api/types";
import { titleText } from "../../state/names";
import { Notice } from "../notices";
import { RouteLink } from "../route_link";
import { hasOnlyFigures } from "../times";

/** Where a recording names no module: what the rows are then, and how the next one names them. */
export function NoModules({ step, operators }: { step: StepAnswer | undefined; operators: boolean }) {
  if (hasOnlyFigures(step))
    return (
      <div class="over-cards">
        <Notice level="warning" testid="only-figures">
          Only the figures of this step are here: the side file with its modules{" "}
          <span class="mono">{titleText(step!.source.side_file)} </span>
          cannot be read. Copy the run's folder plugins/tb_memplugin from the machine that recorded it, then reload.
        </Notice>
      </div>
    );
  return (
    <div class="over-cards">
      <Notice level="info" testid="no-modules">
        This recording names no modules
        {operators ? ", so its rows stand for the operators that allocated" : " and no operators, so all is in one row"}.{" "}
        <RouteLink to={{ view: "stacks" }}>Stacks</RouteLink> and{" "}
        <RouteLink to={{ view: "timeline" }}>Timeline</RouteLink> show what else it knows. To see modules:{" "}
        <span class="mono">{HOW[step?.source.kind ?? ""] ?? "memory_trace_handler(DIR, model=model, optimizer=optimizer)"}</span>
      </Notice>
    </div>
  );
}

const HOW: Record<string, string> = {
  snapshot: "memory_trace_handler(DIR, model=model, optimizer=optimizer, snapshot=True)",
  MemoryTracer: "tracer.trace(model, optimizer)",
  LineTracer: "MemoryTracer().trace(model, optimizer)",
};
