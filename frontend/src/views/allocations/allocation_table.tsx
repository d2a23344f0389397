import { useEffect, useState } from "preact/hooks";
import { type Remote, useRemote } from "../../api/remote";
import { address, type Query } from "../../api/request";
import type { AllocationsAnswer, Listed } from "../../api/types";
import { navigate, route, stretch } from "../../state/app";
import { exactBytes, inUnit, type Unit, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { allocationName, titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import type { Stretch } from "../../state/stretch";
import { duration, exactTime } from "../../state/time";
import { Category } from "../category";
import { Name } from "../name";
import { Line } from "../stacks/ranked";
import { FailureState } from "../states";
import { SortedHead } from "../sorted_head";
import { Tensor } from "../tensor";
import { type InSight, reusedKey, RowsInSight, useRowsInSight } from "../windowed";

const ROW = 31;
/** Browsers stop at some tens of millions of pixels; nobody scrolls further than this. */
const MOST = 400_000;

const SORTING = { by: "listed", orders: ["bytes", "born", "lifetime", "address"], usual: "bytes", testid: "list" } as const;
const COLUMNS = [
  ["born", "allocated", "When it was made, since the step began"],
  ["lifetime", "lives", "How long it lived, as far as the window shows it"],
  ["address", "address", "Its address, and after _ how many were there before it"],
] as const;

interface Props {
  pick: Stretch["query"];
  over: string;
  range: { t0?: number; t1?: number };
  zoomed: boolean;
  selected: number | null;
  /** Whether lines of code are known that tell allocations apart. */
  withCode: boolean;
  /** Whether anything is known that names them. */
  withNames: boolean;
  /** Bytes of the largest that is drawn: the table's unit. */
  largest: number;
  /** Told how many there are in all; null while that is not known. */
  onAlive: (count: number | null) => void;
}

/** Every allocation that lived in what is shown; the server sorts, searches and hands out pages. */
export function AllocationTable({ pick, over, range, zoomed, selected, withCode, largest, ...props }: Props) {
  const { search = "", listed = "bytes" } = route.value;
  const [count, setCount] = useState(0);
  const { box, sight } = useRowsInSight(Math.min(count, MOST), ROW);
  const query = { ...pick, over, ...range, find: search || undefined, sort: listed };
  const pages = usePages(query, sight, search || zoomed ? 90 : 0);
  const { data, stale, failure } = pages.any;
  useEffect(() => {
    if (data && !stale) setCount(data.rows_found);
    props.onAlive(data && !stale ? data.rows_all : null);
  }, [data, stale]);
  useEffect(() => {
    if (box.current) box.current.scrollTop = 0;
  }, [search, listed, range.t0, range.t1]);
  if (failure) return <FailureState failure={failure} />;
  const { peak, from, whole } = stretch.value!;
  const unit = unitWithin(unitFor(peak.bytes), largest);
  const withWhat = props.withNames || !withCode;
  const columns = 5 + Number(withCode) + Number(withWhat);
  const shown = Math.min(sight.last, Math.min(count, MOST));
  return (
    <section class={stale ? "card allocation-table stale" : "card allocation-table"} aria-busy={stale}>
      <div class="tools">
        <h2>{zoomed ? "Alive in this view" : `Alive in the ${whole ? "window" : "step"}`}</h2>
        <input
          class="search"
          type="search"
          placeholder="Search stack, module, operator, category, float32 […, 0x…"
          aria-label="Search allocations"
          data-testid="allocation-search"
          value={search}
          maxLength={400}
          onInput={(e) => navigate({ search: e.currentTarget.value || undefined })}
        />
        {data && (
          <span class="hint" data-testid="allocations-sum" title={`${exactBytes(data.bytes_found)}, made one after the other`}>
            {grouped(data.rows_found)}
            {search ? ` of ${grouped(data.rows_all)}` : ""} {data.rows_found === 1 ? "allocation" : "allocations"},{" "}
            {withUnit(data.bytes_found)} in all
            {data.rows_found > MOST && ` · the first ${grouped(MOST)} in this order are listed: search to see others`}
          </span>
        )}
      </div>
      <div class="scroller" ref={box} tabIndex={0} role="region" aria-label="Allocations" data-testid="allocation-rows" style={{ margin: "0 -8px", maxHeight: "560px" }}>
        <table class="grid" style={{ minWidth: "1040px" }} aria-rowcount={count + 1}>
          <colgroup>
            <col style={{ width: "96px" }} />
            {withCode && <col />}
            {withWhat && <col style={withCode ? { width: "26%" } : undefined} />}
            <col style={{ width: "128px" }} />
            <col style={{ width: "100px" }} />
            <col style={{ width: "100px" }} />
            <col style={{ width: "160px" }} />
          </colgroup>
          <thead>
            <tr>
              <SortedHead sorting={SORTING} id="bytes" label={unit.name} title="The largest first" />
              {withCode && <th scope="col">code</th>}
              {withWhat && <th scope="col">what</th>}
              <th scope="col">category</th>
              {COLUMNS.map(([id, label, title]) => (
                <SortedHead key={id} sorting={SORTING} id={id} label={label} title={title} />
              ))}
            </tr>
          </thead>
          <RowsInSight sight={sight} columns={columns}>
            {Array.from({ length: Math.max(0, shown - sight.first) }, (_, i) => (
              <Row
                key={reusedKey(sight.first + i, sight)}
                one={pages.at(sight.first + i)}
                index={sight.first + i}
                unit={unit}
                withCode={withCode}
                withWhat={withWhat}
                columns={columns}
                origin={from}
                selected={selected}
              />
            ))}
          </RowsInSight>
        </table>
        {data && !stale && data.rows_found === 0 && (
          <p class="nothing" data-testid="no-match">
            {search ? "No allocation matches." : "Nothing was alive here."}
          </p>
        )}
      </div>
    </section>
  );
}

function What({ name, tensor }: { name: string | null; tensor: string | null }) {
  if (name === null) return tensor === null ? <span class="muted">–</span> : <Tensor text={tensor} />;
  return (
    <span class="flexed">
      <Name text={name} />
      <Tensor text={tensor} />
    </span>
  );
}

interface RowProps {
  one: Listed | undefined;
  index: number;
  unit: Unit;
  withCode: boolean;
  withWhat: boolean;
  columns: number;
  origin: number;
  selected: number | null;
}

function Row({ one, index, unit, withCode, withWhat, columns, origin, selected }: RowProps) {
  if (!one)
    return (
      <tr aria-rowindex={index + 2}>
        <td colSpan={columns} class="muted">
          …
        </td>
      </tr>
    );
  const chosen = one.row === selected;
  const what = allocationName(one);
  const own = unitWithin(unit, one.bytes);
  return (
    <tr
      aria-rowindex={index + 2}
      aria-selected={chosen}
      class={chosen ? "chosen" : undefined}
      data-testid="allocation-row"
      data-row={one.row}
      data-bytes={one.bytes}
      onClick={() => navigate({ block: String(one.row) })}
    >
      <td class="number strong" title={exactBytes(one.bytes)}>
        {own === unit ? inUnit(one.bytes, unit) : withUnit(one.bytes, own)}
      </td>
      <th scope="row">
        <button type="button" class="fold" aria-pressed={chosen}>
          {!withCode ? (
            <What name={what} tensor={one.tensor} />
          ) : one.line === null ? (
            <span class="muted">no stack</span>
          ) : (
            <Line line={one.line} kind={one.kind} />
          )}
        </button>
      </th>
      {withCode && withWhat && (
        <td>
          <What name={what} tensor={one.tensor} />
        </td>
      )}
      <td>
        <Category of={one.category} />
      </td>
      <td class="number muted" title={one.born_ns === null ? "before the window" : exactTime(one.born_ns - origin)}>
        {one.born_ns === null ? "before" : duration(one.born_ns - origin)}
      </td>
      <td class="number muted" title={one.lifetime_ns === null ? "longer than the window shows" : exactTime(one.lifetime_ns)}>
        {one.lifetime_ns === null ? (one.freed_ns === null ? "to the end" : "until freed") : duration(one.lifetime_ns)}
      </td>
      <td class="number mono muted" title={titleText(one.address)}>
        {/^0x0*$/.test(one.address) ? "–" : `${one.address}_${one.version}`}
      </td>
    </tr>
  );
}

/** Rows of a long list, asked for page by page as they come into sight. */
export const PAGE = 200;

/** What of a query may differ for old rows to stay on show: the page, the search, the order and the zoom. */
const SAME_STEP = ["first", "find", "sort", "t0", "t1", "over"];

export interface Pages {
  /** The newest answer of any page: counts and sums are the same in all. */
  any: Remote<AllocationsAnswer>;
  at: (index: number) => Listed | undefined;
}

/** A screen of rows lies within two pages at most. */
function usePages(query: Query, sight: Pick<InSight, "first" | "last">, wait: number): Pages {
  const low = Math.floor(sight.first / PAGE) * PAGE;
  const high = Math.floor(Math.max(sight.first, sight.last - 1) / PAGE) * PAGE;
  const path = (first: number): string => address("allocations", { ...query, first, count: PAGE });
  const one = useRemote<AllocationsAnswer>(path(low), wait, SAME_STEP);
  const two = useRemote<AllocationsAnswer>(high === low ? null : path(high), wait, SAME_STEP);
  return {
    any: one,
    at: (index) => {
      for (const page of [one, two]) {
        const row = page.data && !page.stale ? page.data.rows[index - page.data.first] : undefined;
        if (row && page.data && index >= page.data.first) return row;
      }
      return undefined;
    },
  };
}
