import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { AdviceAnswer, Finding, FleetRun } from "../../api/types";
import { titleOf } from "../../state/advice";
import { navigate, picked, route } from "../../state/app";
import { asPartOf, exactBytes, percent } from "../../state/bytes";
import { allocatedPeak, causeOf, FLEET_ORDERS, headroom } from "../../state/fleet";
import { titleText } from "../../state/names";
import { counted, grouped } from "../../state/numbers";
import type { RoutePatch } from "../../state/route";
import { runName } from "../../state/run_name";
import { InOwnUnit } from "../amount";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { Sentence } from "../sentence";
import { SortedHead } from "../sorted_head";
import { RowsInSight, useRowsInSight } from "../windowed";
import { CauseText } from "./causes";

const ROW = 35;
const SORTING = { by: "ordered", orders: FLEET_ORDERS, usual: "cause", testid: "fleet-order" } as const;
const WIDTHS = { curve: 136, peak: 92, resident: 92, headroom: 118, growth: 104, ranks: 66, steps: 72 };

/** A row a run, at the rank that peaks highest. Only the rows in sight are rendered. */
export function FleetTable({ rows }: { rows: FleetRun[] }) {
  const { box, sight } = useRowsInSight(rows.length, ROW);
  const resident = rows.some((row) => row.process !== null);
  const judges = route.value.findings === "on";
  const findings = useFindings(rows.slice(sight.first, sight.last), judges);
  return (
    <div class="scroller" ref={box} tabIndex={0} role="region" aria-label="Runs">
      <table class="grid fleet-table" aria-rowcount={rows.length + 1}>
        <colgroup>
          <col style={{ width: "20%" }} />
          {(["curve", "peak", ...(resident ? ["resident"] as const : []), "headroom", "growth"] as const).map(widthOf)}
          <col />
          {(["ranks", "steps"] as const).map(widthOf)}
        </colgroup>
        <thead>
          <tr>
            <SortedHead sorting={SORTING} id="run" label="run" title="By name and number" words />
            <th scope="col">peaks of its steps</th>
            <SortedHead sorting={SORTING} id="peak" label="peak" title="Allocated memory, the highest of all steps of which it is known, on the rank that peaks highest" />
            {resident && <SortedHead sorting={SORTING} id="resident" label="resident" title="The highest of its processes in any step that was watched: more than tensors, and also of steps that were not recorded in full" />}
            <SortedHead sorting={SORTING} id="headroom" label="headroom" title="What the device has beyond the peak; PyTorch's reserve and other programs take of it, too. The least first" />
            <SortedHead sorting={SORTING} id="growth" label="growth" title="By how many bytes per step what is left after a step rises, on the rank where it rises most; judged as by Advice" />
            <SortedHead sorting={SORTING} id="cause" label="cause" title="Out of memory first, then growth; of other runs the first finding of Advice, if asked for" />
            <SortedHead sorting={SORTING} id="ranks" label="ranks" title="Devices of this kind, on all workers" />
            <SortedHead sorting={SORTING} id="steps" label="steps" title="Steps of the rank that peaks highest" />
          </tr>
        </thead>
        <RowsInSight sight={sight} columns={resident ? 9 : 8}>
          {rows.slice(sight.first, sight.last).map((row, i) => (
            <Row key={row.run} row={row} resident={resident} findings={judges ? findings : null} index={sight.first + i} />
          ))}
        </RowsInSight>
      </table>
      {rows.length === 0 && <p class="muted nothing">No run matches.</p>}
    </div>
  );
}

function widthOf(column: keyof typeof WIDTHS) {
  return <col key={column} style={{ width: `${WIDTHS[column]}px` }} />;
}

interface RowProps {
  row: FleetRun;
  /** Whether the table has a column of processes. */
  resident: boolean;
  /** Null where Advice is not asked. */
  findings: Findings | null;
  index: number;
}

function Row({ row, resident, findings, index }: RowProps) {
  const place = { run: row.run, worker: row.worker, device: row.device, step: String(row.step) };
  const current = picked.value?.run === row.run;
  return (
    <tr
      aria-rowindex={index + 2}
      class={current ? "picked" : undefined}
      data-testid="fleet-row"
      data-key={row.run}
      onClick={(e) => (e.target as Element).closest("a") ?? navigate({ view: "overview", ...place })}
    >
      <th scope="row">
        <RouteLink to={{ view: "overview", ...place }} class="plain-link" title={`Open ${runName(row.run)} on ${row.worker}`}>
          <Name text={runName(row.run)} />
        </RouteLink>
      </th>
      <td>
        <Curve row={row} />
      </td>
      {allocatedPeak(row) === null ? (
        <Unknown title="Only the process was watched" />
      ) : (
        <td class="number strong" title={`${exactBytes(row.peak_bytes)}, at step ${row.step} of ${row.worker}`}>
          {row.at_least && "≥ "}
          <InOwnUnit bytes={row.peak_bytes} />
        </td>
      )}
      {resident && <Resident row={row} />}
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

function Resident({ row: { process, run } }: { row: FleetRun }) {
  if (process === null) return <Unknown title="The process was not watched" />;
  const { worker, step, bytes } = process;
  return (
    <td class="number" title={`${exactBytes(bytes)}, at step ${step} of ${worker}`}>
      <RouteLink to={{ view: "overview", run, worker, device: "process", step: String(step) }}>
        <InOwnUnit bytes={bytes} />
      </RouteLink>
    </td>
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

const WIDTH = 120;
const HEIGHT = 22;
const FULL = 1000;

/** The peaks of a run's steps, from 0 to the highest, which is marked. The numbers are in the columns beside it. */
function Curve({ row: { curve, first, last, steps } }: { row: FleetRun }) {
  const wide = WIDTH / curve.length;
  const y = (value: number): number => HEIGHT - ((HEIGHT - 3) * value) / FULL;
  const top = curve.indexOf(FULL);
  const outline = curve.map((value, i) => `H${(i * wide).toFixed(1)}V${y(value).toFixed(1)}H${((i + 1) * wide).toFixed(1)}`);
  return (
    <svg class="spark" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} width={WIDTH} height={HEIGHT} aria-hidden="true" data-testid="spark">
      <title>{first === last ? `step ${first}` : `${counted(steps, "step")}, ${first} to ${last}`}</title>
      <path class="spark-area" d={`M0 ${HEIGHT}${outline.join("")}V${HEIGHT}Z`} />
      <circle class="spark-peak" cx={Math.min(WIDTH - 2.5, Math.max(2.5, (top + 0.5) * wide))} cy={y(FULL)} r="2.5" />
    </svg>
  );
}

/** By run, its first finding; null where Advice finds nothing. */
export type Findings = ReadonlyMap<string, Finding | null | "not judged">;

/** Asks Advice for runs without a cause, one after the other: its rules read all events of a window. */
function useFindings(rows: FleetRun[], on: boolean): Findings {
  const [known, learn] = useState<Findings>(new Map());
  const next = on ? rows.find((row) => causeOf(row) === null && !known.has(keyOf(row))) : undefined;
  const answer = useRemote<AdviceAnswer>(next ? address("advice", placeOf(next)) : null);
  const { data, failure } = answer;
  useEffect(() => {
    if (!next || !(data || failure)) return;
    learn(new Map(known).set(keyOf(next), failure ? "not judged" : (data!.findings[0] ?? null)));
  }, [data, failure]);
  return known;
}

/** A step more is another recording. */
export function keyOf({ run, step, last }: FleetRun): string {
  return JSON.stringify([run, step, last]);
}

function placeOf({ run, worker, device, step }: FleetRun) {
  return { run, worker, device, step };
}

/** The first finding of a run, and the way to its Advice; empty while it is asked for. */
function FirstFinding({ row, finding }: { row: FleetRun; finding: Finding | null | "not judged" | undefined }) {
  if (finding === undefined) return <span aria-busy="true" />;
  if (finding === null || finding === "not judged") return <span class="muted">{finding ?? "nothing found"}</span>;
  const { bytes, of_bytes, measure, title } = finding;
  return (
    <RouteLink
      to={{ view: "advice", ...placeOf(row), step: String(row.step) }}
      class="plain-link"
      title={`${titleText(title)} ${exactBytes(bytes)} ${measure}`}
      testid="fleet-finding"
    >
      <span class="finding-bytes">
        {asPartOf(of_bytes, bytes)} {measure}:
      </span>{" "}
      <span class="muted">
        <Sentence pieces={titleOf(finding)} />
      </span>
    </RouteLink>
  );
}
