import { useCallback, useEffect, useMemo, useState } from "preact/hooks";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { Rank, RanksAnswer, StepAnswer } from "../../api/types";
import { navigate, picked, route } from "../../state/app";
import { exactBytes, inUnit, percent, type Unit } from "../../state/bytes";
import { highestRank, measured, nounOf, oneStep, ordered, ORDERS, overMedian, rankName } from "../../state/ranks";
import { Delta } from "../amount";
import { CategoryBar, CategoryKey } from "../category";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { NumberHead, ShareBar, UnseenHead } from "../table";
import { SortedHead } from "../sorted_head";
import { RowsInSight, useRowsInSight } from "../windowed";
import { canCompare, comparing } from "./why";

const ROW = 31;
const SORTING = { by: "ordered", orders: ORDERS, usual: "highest", testid: "order" } as const;
const WIDTHS = { highest: 92, "at step": 82, "vs median": 100, "%": 84, median: 150, spread: 84 };

interface Props {
  answer: RanksAnswer;
  run: string;
  unit: Unit;
}

/** A row a rank: its highest, against the median rank there, what it consists of, and how much its steps differ. */
export function RankTable({ answer, run, unit }: Props) {
  const order = route.value.ordered;
  const rows = useMemo(() => ordered(answer.rows, order), [answer.rows, order]);
  const top = highestRank(answer.rows);
  const noun = nounOf(answer.rows);
  const alone = oneStep(answer.rows);
  const { box, sight } = useRowsInSight(rows.length, ROW);
  const steps = Math.max(...answer.rows.map((row) => row.count));
  const [drawn, draw] = useState<ReadonlySet<string>>(new Set());
  const onDrawn = useCallback((keys: string[]) => draw((known) => (keys.every((key) => known.has(key)) ? known : new Set([...known, ...keys]))), []);
  return (
    <section class="card">
      <div class="tools">
        <h2>Each {noun} at its highest</h2>
        <span class="hint">
          {unit.name}, {measured(answer)}
        </span>
      </div>
      <div class="scroller" ref={box} tabIndex={0} role="region" aria-label="Ranks">
        <table class="grid ranks-table" aria-rowcount={rows.length + 1}>
          <colgroup>
            <col style={{ width: "26%" }} />
            <col />
            {Object.entries(WIDTHS).map(
              ([column, width]) =>
                (column !== "at step" || !alone) && (column !== "spread" || steps > 1) && <col key={column} style={{ width: `${width}px` }} />,
            )}
          </colgroup>
          <thead>
            <tr>
              <SortedHead sorting={SORTING} id="worker" label={noun} title="By name and number" words />
              <UnseenHead wide>what it consists of</UnseenHead>
              <SortedHead sorting={SORTING} id="highest" label="highest" title={`Highest of all steps: ${measured(answer)}`} />
              {!alone && <SortedHead sorting={SORTING} id="step" label="at step" title="The step of the highest; the first of several" />}
              <SortedHead
                sorting={SORTING}
                id="median"
                label="vs median"
                title={`Against the median of all ${noun}s that have this step; of an even number, the lower of the two`}
              />
              <NumberHead title={`The same as a share of the median ${noun}'s bytes`}>%</NumberHead>
              <th scope="col" class="after-number">
                median {noun}
              </th>
              {steps > 1 && <SortedHead sorting={SORTING} id="spread" label="spread" title="From its lowest to its highest step" />}
            </tr>
          </thead>
          <RowsInSight sight={sight} columns={8}>
            {rows.slice(sight.first, sight.last).map((row, i) => (
              <Row
                key={JSON.stringify([row.worker, row.device])}
                row={row}
                rows={answer.rows}
                top={top}
                run={run}
                unit={unit}
                several={steps > 1}
                bars={answer.of === "allocated"}
                onDrawn={onDrawn}
                index={sight.first + i}
              />
            ))}
          </RowsInSight>
        </table>
      </div>
      {drawn.size > 0 && <CategoryKey keys={drawn} />}
    </section>
  );
}

interface RowProps {
  row: Rank;
  rows: Rank[];
  top: Rank;
  run: string;
  unit: Unit;
  several: boolean;
  bars: boolean;
  /** Is told the categories of its bar. */
  onDrawn: (keys: string[]) => void;
  index: number;
}

function Row({ row, rows, top, run, unit, several, bars, onDrawn, index }: RowProps) {
  const place = { worker: row.worker, device: row.device, step: String(row.highest_step) };
  const delta = overMedian(row);
  const now = picked.value!;
  const current = now.worker === row.worker && now.device === row.device;
  return (
    <tr
      aria-rowindex={index + 2}
      class={current ? "picked" : undefined}
      data-testid="rank-row"
      data-key={rankName(row, rows)}
    >
      <th scope="row">
        <button type="button" class="fold" title="Pick this one at its highest" onClick={() => navigate(place)}>
          <Name text={rankName(row, rows)} />
          {row === top && <span class="pill grown">highest</span>}
        </button>
      </th>
      <td class="wide">
        <AtPeak row={row} run={run} unit={unit} full={top.highest_bytes} bars={bars} onDrawn={onDrawn} />
      </td>
      <td class="number strong" title={exactBytes(row.highest_bytes)}>
        <RouteLink to={{ view: "overview", ...place }} class="plain-number">
          {row.at_least && "≥ "}
          {inUnit(row.highest_bytes, unit)}
        </RouteLink>
      </td>
      {!oneStep(rows) && <td class="number muted">{row.highest_step}</td>}
      <td class="number">
        {delta === null ? (
          <span class="muted" title="No other has this step">
            ·
          </span>
        ) : bars && canCompare(row) ? (
          <RouteLink to={comparing(row, run)} class="plain-number" title="Compare the two">
            <Delta bytes={delta} unit={unit} />
          </RouteLink>
        ) : (
          <Delta bytes={delta} unit={unit} />
        )}
      </td>
      <td class="number muted">{delta === null || delta === 0 ? "" : share(delta, row.median!.bytes)}</td>
      <td class="muted after-number">{row.median && <Name text={rankName(row.median, rows)} />}</td>
      {several && (
        <td class="number muted" title={`${exactBytes(row.highest_bytes - row.lowest_bytes)}; lowest in step ${row.lowest_step}`}>
          {inUnit(row.highest_bytes - row.lowest_bytes, unit)}
        </td>
      )}
    </tr>
  );
}

function share(delta: number, median: number): string {
  return `${delta > 0 ? "+" : "−"}${percent(Math.abs(delta), median)}`;
}

/** The categories of the peak where the step was recorded in full, else its length alone. */
function AtPeak({ row, run, unit, full, bars, onDrawn }: Pick<RowProps, "row" | "run" | "unit" | "bars" | "onDrawn"> & { full: number }) {
  const { worker, device, highest_step, recorded, highest_bytes } = row;
  const step = useRemote<StepAnswer>(
    bars && recorded ? address("step", { run, worker, step: highest_step, device }) : null,
    80,
  );
  const parts = step.data?.peak.by_category;
  useEffect(() => parts && onDrawn(parts.map((part) => part.key)), [parts, onDrawn]);
  if (parts)
    return <CategoryBar categories={Object.fromEntries(parts.map((part) => [part.key, part.bytes]))} full={full} unit={unit} />;
  return <ShareBar share={highest_bytes / full} />;
}
