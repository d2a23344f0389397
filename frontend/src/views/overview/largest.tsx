import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { Allocation, AllocationsAnswer, Listed, StepAnswer } from "../../api/types";
import { unitFor, unitWithin } from "../../state/bytes";
import { allocationName, NOT_NAMED, titleText } from "../../state/names";
import type { Pick } from "../../state/selection";
import { duration } from "../../state/time";
import { Category } from "../category";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { Line } from "../stacks/ranked";
import { lacksShapes, ShapesAreRecorded, Tensor } from "../tensor";
import { Heads } from "../table";
import { BytesCell } from "../amount";

const MOST = 8;

/** The largest allocations alive at the peak: what each is, where it was made, how long it lives. */
export function Largest({ pick, answer: { peak, source } }: { pick: Pick; answer: StepAnswer }) {
  const listed = useWithCode(pick, peak);
  if (peak.largest.length === 0) return null;
  const rows: Allocation[] = listed ?? peak.largest;
  const unit = unitWithin(unitFor(peak.bytes), peak.largest[0]!.bytes);
  return (
    <section class="card" data-testid="largest">
      <div class="row">
        <h2 class="grow">Largest alive at the peak</h2>
        <RouteLink to={{ view: "allocations" }}>All allocations</RouteLink>
      </div>
      <table class="plain largest">
        <Heads columns={[{ number: unit.name }, "what", "category", "made by", { number: "lives" }]} />
        <tbody>
          {rows.slice(0, MOST).map((a, i) => (
            <tr key={i}>
              <BytesCell bytes={a.bytes} unit={unit} tone="strong" />
              <td class="cut">
                <span class="flexed">
                  {listed?.[i]?.line ? <Code one={listed[i]} /> : <Name text={allocationName(a) ?? NOT_NAMED} />}
                  <Tensor text={a.tensor} />
                </span>
              </td>
              <td class="category" title={titleText(a.why)}>
                <Category of={a.category} />
              </td>
              <td class="cut">
                {a.operator ? <Name text={a.operator} /> : <span class="muted">{a.born_ns === null ? "before the window" : "not recorded"}</span>}
              </td>
              <td class="number muted">{lifetime(a)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {lacksShapes({ peak, source }) && (
        <p class="foot" data-testid="lacks-shapes">
          <ShapesAreRecorded />
        </p>
      )}
    </section>
  );
}

/** Where no allocation has a name, they go by the code that asked for them, where that is known. */
function useWithCode(pick: Pick, peak: StepAnswer["peak"]): Listed[] | undefined {
  const named = peak.largest.some((a) => allocationName(a) !== null);
  const event = Math.max(0, peak.event); // before the first event the list may hold what that one makes
  const at = { over: "event", t0: event, t1: event + 1, sort: "bytes", first: 0, count: MOST };
  const asks = !named && peak.largest.length > 0;
  const rows = useRemote<AllocationsAnswer>(asks ? address("allocations", { ...pick, ...at }) : null).data?.rows;
  const same = rows?.every((row, i) => row.bytes === peak.largest[i]?.bytes);
  return same && rows?.some((row) => row.line !== null) ? rows : undefined;
}

function Code({ one }: { one: Listed }) {
  return <Line line={one.line ?? ""} kind={one.kind} />;
}

function lifetime(a: Allocation) {
  if (a.born_ns === null) return a.freed_ns === null ? "throughout" : "until freed";
  const born = { view: "timeline", t: String(a.born_ns) } as const;
  return <RouteLink to={born}>{a.freed_ns === null ? "to the end" : duration(a.freed_ns - a.born_ns)}</RouteLink>;
}
