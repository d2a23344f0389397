import type { ComponentChildren } from "preact";
import type { FleetRun } from "../../api/types";
import { picked, route } from "../../state/app";
import { exactBytes, percent } from "../../state/bytes";
import { causeOf, FLEET_ORDERS, headroom } from "../../state/fleet";
import { grouped } from "../../state/numbers";
import type { RoutePatch } from "../../state/route";
import { runName } from "../../state/run_name";
import { InOwnUnit } from "../amount";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { SortedHead } from "../sorted_head";
import { RowsInSight, useRowsInSight } from "../windowed";
import { CauseText } from "./causes";
import { Curve } from "./curve";
import { type Findings, FirstFinding, keyOf, useFindings } from "./findings";

const ROW = 35;
const COLUMNS = 8;
const SORTING = { by: "ordered", orders: FLEET_ORDERS, usual: "cause", testid: "fleet-order" } as const;
const WIDTHS = [136, 92, 118, 104, 66, 72];

/** A row a run, at the rank that peaks highest. Only the rows in sight are rendered. */
export function FleetTable({ rows }: { rows: FleetRun[] }) {
  const { box, sight } = useRowsInSight(rows.length, ROW);
  const judges = route.value.findings === "on";
  const findings = useFindings(rows.slice(sight.first, sight.last), judges);
  return (
    <div class="scroller" ref={box} tabIndex={0} role="region" aria-label="Runs">
      <table class="grid fleet-table" aria-rowcount={rows.length + 1}>
        <colgroup>
          <col style={{ width: "20%" }} />
          {WIDTHS.slice(0, 4).map((width, i) => (
            <col key={i} style={{ width: `${width}px` }} />
          ))}
          <col />
          {WIDTHS.slice(4).map((width, i) => (
            <col key={i} style={{ width: `${width}px` }} />
          ))}
        </colgroup>
        <thead>
          <tr>
            <SortedHead sorting={SORTING} id="run" label="run" title="By name and number" words />
            <th scope="col">peaks of its steps</th>
            <SortedHead sorting={SORTING} id="peak" label="peak" title="The highest of all steps and ranks: allocated memory" />
            <SortedHead sorting={SORTING} id="headroom" label="headroom" title="What the device has beyond the peak; PyTorch's reserve and other programs take of it, too. The least first" />
            <SortedHead sorting={SORTING} id="growth" label="growth" title="By how many bytes per step what is left after a step rises, on the rank where it rises most; judged as by Advice" />
            <SortedHead sorting={SORTING} id="cause" label="cause" title="Out of memory first, then growth; of other runs the first finding of Advice, if asked for" />
            <SortedHead sorting={SORTING} id="ranks" label="ranks" title="Devices of this kind, on all workers" />
            <SortedHead sorting={SORTING} id="steps" label="steps" title="Steps of the rank that peaks highest" />
          </tr>
        </thead>
        <RowsInSight sight={sight} columns={COLUMNS}>
          {rows.slice(sight.first, sight.last).map((row, i) => (
            <Row key={row.run} row={row} findings={judges ? findings : null} index={sight.first + i} />
          ))}
        </RowsInSight>
      </table>
      {rows.length === 0 && <p class="muted nothing">No run matches.</p>}
    </div>
  );
}

interface RowProps {
  row: FleetRun;
  /** Null where Advice is not asked. */
  findings: Findings | null;
  index: number;
}

function Row({ row, findings, index }: RowProps) {
  const place = { run: row.run, worker: row.worker, device: row.device, step: String(row.step) };
  const current = picked.value?.run === row.run;
  return (
    <tr aria-rowindex={index + 2} class={current ? "picked" : undefined} data-testid="fleet-row" data-key={row.run}>
      <th scope="row">
        <RouteLink to={{ view: "overview", ...place }} class="plain-link" title={`Open ${runName(row.run)} on ${row.worker}`}>
          <Name text={runName(row.run)} />
        </RouteLink>
      </th>
      <td>
        <Curve row={row} />
      </td>
      <td class="number strong" title={`${exactBytes(row.peak_bytes)}, at step ${row.step} of ${row.worker}`}>
        {row.at_least && "≥ "}
        <InOwnUnit bytes={row.peak_bytes} />
      </td>
      <Room row={row} />
      <Growth row={row} place={place} />
      <td class="cause">
        {findings !== null && causeOf(row) === null ? <FirstFinding row={row} finding={findings.get(keyOf(row))} /> : <Why row={row} />}
      </td>
      <td class="number muted">
        {row.ranks === 1 ? 1 : <RouteLink to={{ view: "ranks", ...place }}>{grouped(row.ranks)}</RouteLink>}
      </td>
      <td class="number muted">{grouped(row.steps)}</td>
    </tr>
  );
}

function Room({ row }: { row: FleetRun }) {
  const room = headroom(row);
  if (room === null) return <Unknown title="The memory of the device was not recorded" />;
  return (
    <td class="number" title={`${exactBytes(room)}; the peak is ${percent(row.peak_bytes, row.capacity_bytes!)} of the device`}>
      <InOwnUnit bytes={room} />
    </td>
  );
}

function Growth({ row, place }: { row: FleetRun; place: RoutePatch }) {
  if (row.growth_bytes === null) return <Unknown title="Too few steps to tell" />;
  if (!row.growing) return <td class="number muted">–</td>;
  const { worker, device, bytes } = row.growing;
  return (
    <td class="number" title={`${exactBytes(bytes)}, on ${worker} ${device}`}>
      <RouteLink to={{ view: "advice", ...place, worker, device }} class="plain-number grown">
        +<InOwnUnit bytes={bytes} />
      </RouteLink>
    </td>
  );
}

function Unknown({ title }: { title: string }): ComponentChildren {
  return (
    <td class="number muted" title={title}>
      ·
    </td>
  );
}

/** Out of memory leads to the allocator at that step, growth to the advice on the rank that grows. */
function Why({ row }: { row: FleetRun }) {
  const cause = causeOf(row);
  if (cause === null || (cause === "failed" && !row.failed)) return null;
  const { worker, device } = row.failed ?? row.growing!;
  const step = row.failed ? String(row.failed.step) : undefined;
  return (
    <RouteLink to={{ view: row.failed ? "allocator" : "advice", run: row.run, worker, device, step }} class="plain-link" testid="fleet-cause">
      <CauseText cause={cause} line={row.failed?.line ?? null} />
    </RouteLink>
  );
}
