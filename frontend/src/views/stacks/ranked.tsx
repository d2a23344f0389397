import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address, type Query } from "../../api/request";
import type { Kind, Whole } from "../../api/types";
import { route } from "../../state/app";
import { exactBytes, percent, type Unit, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { lineParts } from "../../state/frames";
import { cellText, titleText } from "../../state/names";
import { counted, grouped } from "../../state/numbers";
import { useRowKeys } from "../row_keys";
import { NumberHead, ShareBar, UnseenHead } from "../table";
import { SortedHead } from "../sorted_head";
import { choice, SAME_RUN } from "./choice";
import { BytesCell } from "../amount";

const PAGE = 100;
const SORTING = { by: "ranked", orders: ["line", "bytes", "count", "per_call"], usual: "bytes", testid: "rank" } as const;

interface RankedRow {
  kind: Kind;
  bytes: number;
  count: number;
}

interface RankedAnswer<Row> extends Whole {
  rows_found: number;
  first: number;
  rows: Row[];
}

/** What the numbers of a table are measured by. */
export interface Scale {
  /** All bytes that the rows are of, and those of the largest row. */
  bytes: number;
  widest: number;
  unit: Unit;
  /** Of the last column. */
  sizeUnit: Unit;
}

interface Props<Row, Answer> {
  what: "line" | "stack";
  query: Query;
  search: string;
  picker: ComponentChildren;
  /** Label and title of the first column. */
  name: readonly [string, string];
  /** The last column, the size of one allocation: label, title, and a row's value. */
  size: readonly [string, string, (row: Row) => number];
  noMatch: string;
  /** Of an answer, what makes a row. */
  rows: (answer: Answer, scale: Scale) => (row: Row, at: number) => ComponentChildren;
}

/** Rows by their bytes, page by page; the server sorts and searches. */
export function Ranked<Row extends RankedRow, Answer extends RankedAnswer<Row> = RankedAnswer<Row>>(
  props: Props<Row, Answer>,
) {
  const { what, query, search, picker, name, size } = props;
  const [first, setFirst] = useState(0);
  const sort = route.value.ranked ?? "bytes";
  useEffect(() => setFirst(0), [search, sort]);
  const path = address(`${what}_table`, { ...query, find: search || undefined, sort, first, count: PAGE });
  const answer = useRemote<Answer>(path, search ? 80 : 0, SAME_RUN);
  const data = answer.data;
  const keys = useRowKeys();
  if (answer.failure) return <p class="nothing">{titleText(answer.failure.what)}</p>;
  if (!data) return <p class="loading">Reading the {what}s …</p>;
  const unit = unitFor(data.bytes);
  const sizeUnit = unitWithin(unit, largest(data.rows.map(size[2])));
  const scale = { bytes: data.bytes, widest: largest(data.rows.map((row) => row.bytes)), unit, sizeUnit };
  return (
    <div class={answer.stale ? "stale" : undefined} aria-busy={answer.stale}>
      <Tools picker={picker}>
        <Pages first={data.first} count={data.rows.length} all={data.rows_found} onGo={setFirst} />
        <span class="hint" data-testid={`${what}s-sum`} title={exactBytes((data.found ?? data).bytes)}>
          {unit.name} · {counted(data.rows_found, what)}
          {data.found ? " found" : ""} sum to {withUnit((data.found ?? data).bytes, unit)}
        </span>
      </Tools>
      <div class="sideways">
        <table class="plain ranked">
          <thead>
            <tr>
              <SortedHead sorting={SORTING} id="line" label={name[0]} title={name[1]} words />
              <UnseenHead>share</UnseenHead>
              <SortedHead sorting={SORTING} id="bytes" label={choice().of === "step" ? "allocated" : "alive"} title="Bytes" />
              <NumberHead>%</NumberHead>
              <SortedHead sorting={SORTING} id="count" label="allocations" title="How many allocations" />
              <SortedHead sorting={SORTING} id="per_call" label={sizeUnit === unit ? size[0] : `${size[0]}, ${sizeUnit.name}`} title={size[1]} />
            </tr>
          </thead>
          <tbody {...keys}>{data.rows.map(props.rows(data, scale))}</tbody>
        </table>
      </div>
      {data.rows.length === 0 && (
        <p class="nothing" data-testid="no-match">
          {search ? props.noMatch : "Nothing was allocated."}
        </p>
      )}
    </div>
  );
}

function largest(values: number[]): number {
  return values.reduce((top, value) => Math.max(top, value), 0);
}

/** All cells of a row but its name. */
export function RankedCells({ row, size, scale }: { row: RankedRow; size: number; scale: Scale }) {
  return (
    <>
      <td>
        <ShareBar share={row.bytes / scale.widest} kind={row.kind} />
      </td>
      <BytesCell bytes={row.bytes} unit={scale.unit} tone="strong" />
      <td class="number muted">{percent(row.bytes, scale.bytes)}</td>
      <td class="number muted">{grouped(row.count)}</td>
      <BytesCell bytes={size} unit={scale.sizeUnit} tone="muted" />
    </>
  );
}

/** A source line: what tells it apart first, behind it who called it, else its folder. */
export function Line({ line, kind, by = "" }: { line: string; kind: string; by?: string }) {
  const { place, name, folder } = lineParts(line);
  return (
    <span class="source-line" title={titleText(line)}>
      <span class={`swatch flame-${kind}`} aria-hidden="true" />
      <span class="mono place">{cellText(place)}</span>
      {name && <span class={kind === "user" ? "mono called strong" : "mono called"}>{cellText(name)}</span>}
      {(by || folder) && <span class="folder">{by || (folder.length > 90 ? `…${folder.slice(-88)}` : folder)}</span>}
    </span>
  );
}

/** Which rows are on show, and the way to the next ones. */
function Pages({ first, count, all, onGo }: { first: number; count: number; all: number; onGo: (first: number) => void }) {
  if (all <= PAGE && first === 0) return null;
  return (
    <span class="pages">
      <button type="button" class="small" disabled={first === 0} onClick={() => onGo(Math.max(0, first - PAGE))}>
        ‹ before
      </button>
      <span data-testid="page">
        {grouped(first + 1)} to {grouped(first + count)} of {grouped(all)}
      </span>
      <button type="button" class="small" disabled={first + count >= all} onClick={() => onGo(first + PAGE)}>
        next ›
      </button>
    </span>
  );
}

export function Tools({ picker, children }: { picker: ComponentChildren; children: ComponentChildren }) {
  return (
    <div class="tools">
      {picker}
      {children}
    </div>
  );
}
