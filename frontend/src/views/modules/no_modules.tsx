import { Notice } from "../notices";
import { RouteLink } from "../route_link";

/** Where a recording names no module: why, what the rows are then, and how the next one names them. */
export function NoModules({ kind }: { kind: string | undefined }) {
  return (
    <div class="over-cards">
      <Notice level="info" testid="no-modules">
        This recording names no modules, so its rows stand for the operators that allocated.{" "}
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
