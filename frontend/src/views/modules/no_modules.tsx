import { Notice } from "../notices";
import { RouteLink } from "../route_link";

/** Where a recording names no module: what the rows are then, and how the next one names them. */
export function NoModules({ kind, operators }: { kind: string | undefined; operators: boolean }) {
  return (
    <div class="over-cards">
      <Notice level="info" testid="no-modules">
        This recording names no modules
        {operators ? ", so its rows stand for the operators that allocated" : " and no operators, so all is in one row"}.{" "}
        <RouteLink to={{ view: "stacks" }}>Stacks</RouteLink> and{" "}
        <RouteLink to={{ view: "timeline" }}>Timeline</RouteLink> show what else it knows. To see modules:{" "}
        <span class="mono">{HOW[kind ?? ""] ?? "memory_trace_handler(DIR, model=model, optimizer=optimizer)"}</span>
      </Notice>
    </div>
  );
}

const HOW: Record<string, string> = {
  snapshot: "memory_trace_handler(DIR, model=model, optimizer=optimizer, snapshot=True)",
  MemoryTracer: "tracer.trace(model, optimizer)",
  LineTracer: "MemoryTracer().trace(model, optimizer)",
};
