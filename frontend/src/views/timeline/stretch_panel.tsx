import { address, type Query } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { LanesAnswer, StretchAnswer } from "../../api/types";
import { laneRows, spanLabel } from "../../draw/lanes";
import { exactBytes, type Unit, unitWithin, withUnit } from "../../state/bytes";
import { counted, grouped } from "../../state/numbers";
import { duration, exactTime } from "../../state/time";
import { Delta } from "../amount";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { LargeAllocations } from "./large_allocations";
import { Fact } from "../fact";

interface Props {
  query: Query & { t0: number; t1: number };
  lanes: LanesAnswer | undefined;
  origin: number;
  page: Unit;
}

/** What happened in the stretch that was zoomed to, such as a module's call: its highest, what came, went and stayed. */
export function StretchPanel({ query, lanes, origin, page }: Props) {
  const answer = useRemote<StretchAnswer>(address("stretch", query), 120, ["t0", "t1"]);
  const { data, stale, failure } = answer;
  const name = lanes && whatRan(lanes, query.t0, query.t1);
  return (
    <section class="card side" data-testid="stretch-panel" data-exact={data && !stale ? "true" : "false"} aria-label="What is zoomed to">
      <h2>{name ? <Name text={name} prose /> : "In the stretch shown"}</h2>
      {failure ? (
        <p class="where">{failure.what}</p>
      ) : data ? (
        <Figures data={data} origin={origin} page={page} stale={stale} />
      ) : (
        <p class="where">adding up …</p>
      )}
    </section>
  );
}

function Figures({ data, origin, page, stale }: { data: StretchAnswer; origin: number; page: Unit; stale: boolean }) {
  const rows = [
    ["allocated", data.allocated],
    ["freed", data.freed],
    ["stayed", data.stayed],
  ] as const;
  const change = data.end_bytes - data.start_bytes;
  return (
    <div class={stale ? "stale" : undefined}>
      <dl class="stretch-figures">
        <Fact of="highest">
          <RouteLink
            to={{ t: String(data.highest_ns), event: String(data.highest_event) }}
            testid="stretch-highest"
            title={exactBytes(data.highest_bytes)}
          >
            {withUnit(data.highest_bytes, page)}
          </RouteLink>
          <span class="muted" title={exactTime(data.highest_ns - origin)}>
            {" "}
            at {duration(data.highest_ns - origin)}, event {grouped(data.highest_event)}
          </span>
        </Fact>
        {rows.map(([what, sum]) => (
          <Figure key={what} what={what} sum={sum} page={page} />
        ))}
        <Fact of="change" title={exactBytes(change)}>
          <Delta bytes={change} unit={page} named />
          <span class="muted"> from {withUnit(data.start_bytes, page)}</span>
        </Fact>
      </dl>
      <LargeAllocations title="Largest that stayed" rows={data.largest.slice(0, 5)} page={page} coloured={false} />
    </div>
  );
}

function Figure({ what, sum, page }: { what: string; sum: StretchAnswer["allocated"]; page: Unit }) {
  return (
    <>
      <dt>{what}</dt>
      <dd>
        <span class="amount" data-testid={`stretch-${what}`} title={exactBytes(sum.bytes)}>
          {withUnit(sum.bytes, unitWithin(page, sum.bytes))}
        </span>
        <span class="muted"> in {counted(sum.count, "allocation")}</span>
      </dd>
    </>
  );
}

/** The innermost call, phase or step that ran exactly then, else that it all lies in. */
function whatRan(lanes: LanesAnswer, t0: number, t1: number): string | undefined {
  const around = laneRows(lanes).flatMap(({ kind, spans }) =>
    spans.filter((span) => span.start_ns <= t0 && span.end_ns >= t1).map((span) => ({ kind, span })),
  );
  const inner = around.at(-1);
  if (!inner) return undefined;
  const exact = inner.span.start_ns === t0 && inner.span.end_ns === t1;
  return `${exact ? "" : "Within "}${spanLabel(inner.kind, inner.span)}`;
}
