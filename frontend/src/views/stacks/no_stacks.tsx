import { useState } from "preact/hooks";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { DivisionsAnswer, MomentAnswer, StepAnswer } from "../../api/types";
import { selection } from "../../state/app";
import { exactBytes, inUnit, percent, unitFor } from "../../state/bytes";
import { categoryLabel } from "../../state/categories";
import { titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import type { Pick } from "../../state/selection";
import { Swatch } from "../category";
import { divisionLabel } from "../divisions";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { Segmented } from "../segmented";
import { ShareBar, ShareHead } from "../table";
import { ESTIMATOR } from "../times";
import { choice } from "./choice";
import { BytesCell } from "../amount";

/** A window without stacks: how to record them, and what is known without. */
export function NoStacks({ pick }: { pick: Pick }) {
  const kind = useRemote<StepAnswer>(address("step", { ...pick })).data?.source.kind;
  return (
    <>
      <section class="state wide-state" data-testid="no-stacks">
        <h1>{kind === ESTIMATOR ? "An estimate has no call stacks." : "This window was recorded without call stacks."}</h1>
        {TRACERS.includes(kind ?? "") ? <WithLineTracer kind={kind} /> : <WithProfiler />}
      </section>
      <Division pick={pick} />
    </>
  );
}

const TRACERS = [ESTIMATOR, "MemoryTracer", "IterationReport"];

function WithLineTracer({ kind }: { kind: string | undefined }) {
  return (
    <>
      <p>
        {kind === ESTIMATOR ? "Its operators and modules are below." : `${titleText(kind ?? "")} records modules and operators: see below.`}{" "}
        To see which source line holds the memory, run a few steps under <span class="mono">LineTracer</span>:
      </p>
      <pre class="code" data-testid="stacks-code">
        {`from tb_memplugin import LineTracer

with LineTracer() as tracer:
    train_step(batch)
tracer.save("runs/lines")`}
      </pre>
    </>
  );
}

function WithProfiler() {
  return (
    <>
      <p>
        To see which code allocated what, pass <span class="mono">with_stack=True</span> to the profiler. On a GPU
        the handler can also record the allocator's history, whose stacks show the very line that allocated:
      </p>
      <pre class="code" data-testid="stacks-code">
        {`handler = memory_trace_handler("runs/first", model=model, optimizer=optimizer, snapshot=True)
with torch.profiler.profile(profile_memory=True, with_stack=True, on_trace_ready=handler):
    train()`}
      </pre>
      <p>
        Afterwards: a trace that torch.profiler exported with stacks, and a snapshot that{" "}
        <span class="mono">torch.cuda.memory._dump_snapshot()</span> wrote, have them too.
      </p>
      <pre class="code">{`tb-memplugin import trace.json --logdir LOGDIR
tb-memplugin import snapshot.pickle --logdir LOGDIR`}</pre>
    </>
  );
}

const WITHOUT_STACKS: DivisionsAnswer["divisions"] = ["operator", "module", "category", "phase", "annotation", "context"];
const MOST = 30;

/** What was alive, by what this window does know. */
function Division({ pick }: { pick: Pick }) {
  const known = useRemote<DivisionsAnswer>(address("divisions", { ...pick }));
  const [asked, ask] = useState<string | undefined>(undefined);
  const offered = WITHOUT_STACKS.filter((by) => known.data?.divisions.includes(by));
  const by = offered.find((one) => one === asked) ?? offered[0];
  const chosen = choice();
  const event = chosen.query["event"] ?? (chosen.query["t"] === undefined ? undefined : null);
  const at = event === null ? { t: chosen.query["t"] } : event === undefined ? { t: selection.value!.stats!.peak_time_ns } : { event };
  const moment = useRemote<MomentAnswer>(by ? address("moment", { ...pick, ...at, by }) : null, 0, ["by"]);
  const parts = moment.data?.parts;
  if (!by || !parts || !moment.data) return null;
  const { bytes } = moment.data;
  const unit = unitFor(bytes);
  const shown = parts.slice(0, MOST);
  const rest = parts.slice(MOST).reduce((sum, part) => sum + part.bytes, 0);
  return (
    <section class={moment.stale ? "card stale" : "card"} data-testid="division">
      <div class="tools">
        <h2>What is known without stacks, by</h2>
        <Segmented
          label="Divide by"
          testid="division-by"
          options={offered.map((key) => [key, divisionLabel(key)] as const)}
          value={by}
          onPick={ask}
        />
        <span class="hint">
          <RouteLink to={{ view: "modules" }}>Modules</RouteLink> and <RouteLink to={{ view: "timeline" }}>Timeline</RouteLink> show more
        </span>
      </div>
      <div class="sideways">
        <table class="plain ranked">
          <ShareHead name={divisionLabel(by).toLowerCase()} unit={unit} />
          <tbody>
            {shown.map((part, i) => (
              <tr key={part.key} data-testid="division-row" data-key={part.key}>
                <th scope="row">
                  <span class="flexed">
                    <Swatch by={by} of={part.key} index={i} />
                    {by === "category" || by === "phase" ? categoryLabel(part.label) : <Name text={part.label} module={by === "module"} />}
                  </span>
                </th>
                <td>
                  <ShareBar share={part.bytes / shown[0]!.bytes} />
                </td>
                <BytesCell bytes={part.bytes} unit={unit} tone="strong" />
                <td class="number muted">{percent(part.bytes, bytes)}</td>
                <td class="number muted">{grouped(part.count)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {rest > 0 && (
        <p class="foot" data-testid="division-rest" title={exactBytes(rest)}>
          {grouped(parts.length - shown.length)} more with {inUnit(rest, unit)} {unit.name}
        </p>
      )}
    </section>
  );
}
