import { useMemo } from "preact/hooks";
import { exactBytes, inUnit, type Unit } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import type { VisibleRow } from "../../state/module_rows";
import type { ModuleNode } from "../../state/module_tree";
import { exactTime, inTimeUnit, type TimeUnit, timeUnitFor } from "../../state/time";
import { titleText } from "../../state/names";
import type { RoutePatch } from "../../state/route";
import { CategoryBar } from "../category";
import { Fold } from "../fold";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { reusedKey, RowsInSight, useRowsInSight } from "../windowed";
import { type At, categoriesAt, type Column, isKnown, type Sorting } from "./columns";
import { UnseenHead } from "../table";

const ROW = 31;
const NAME_AND_BAR = 292;

interface Props {
  rows: VisibleRow[];
  at: At;
  columns: Column[];
  unit: Unit;
  sorting: Sorting | null;
  onSort: (id: string) => void;
  onFlip: (node: ModuleNode) => void;
}

/** Only the rows in sight are in the page, so ten thousand scroll like ten. */
export function ModuleTable({ rows, at, columns, unit, sorting, onSort, onFlip }: Props) {
  const { box, sight } = useRowsInSight(rows.length, ROW);
  const { largest, widest, clock } = useMemo(() => measured(rows, at, columns), [rows, at, columns]);
  const width = columns.reduce((sum, column) => sum + column.width, NAME_AND_BAR);
  return (
    <section class="card grid-card">
      <div class="scroller" ref={box} data-testid="module-table" tabIndex={0} role="region" aria-label="Modules">
        <table class="grid" style={{ minWidth: `${width}px` }} aria-rowcount={rows.length + 1}>
          <colgroup>
            <col style={{ width: "16.5%" }} />
            <col />
            {columns.map((c) => (
              <col key={c.id} style={{ width: `${c.width}px` }} />
            ))}
          </colgroup>
          <thead>
            <tr>
              <Head id="name" label="module" title="Module" sorting={sorting} onSort={onSort} />
              <UnseenHead>categories</UnseenHead>
              {columns.map((c) => (
                <Head
                  key={c.id}
                  id={c.id}
                  label={c.kind === "time" ? `${c.label}, ${clock.name}` : c.label}
                  title={c.title}
                  sorting={sorting}
                  onSort={onSort}
                  number
                />
              ))}
            </tr>
          </thead>
          <RowsInSight sight={sight} columns={columns.length + 2}>
            {rows.slice(sight.first, sight.last).map((row, i) => (
              <tr
                key={reusedKey(sight.first + i, sight)}
                aria-rowindex={sight.first + i + 2}
                data-testid={row.own ? "module-own" : "module-row"}
                data-depth={row.depth}
                data-key={row.node.key}
              >
                <NameCell row={row} onFlip={onFlip} />
                <td>
                  <CategoryBar categories={categoriesAt(row.node, at)} full={widest} unit={unit} />
                </td>
                {columns.map((c) => (
                  <Cell
                    key={c.id}
                    column={c}
                    node={row.node}
                    at={at}
                    unit={unit}
                    largest={largest.get(c.id) ?? 0}
                    clock={clock}
                  />
                ))}
              </tr>
            ))}
          </RowsInSight>
        </table>
        {rows.length === 0 && (
          <p class="nothing" data-testid="no-match">
            No module matches. * stands for any text, ? for one character.
          </p>
        )}
      </div>
    </section>
  );
}

/** What the whole table is scaled by; worked out once, not on every scroll. */
function measured(rows: VisibleRow[], at: At, columns: Column[]) {
  const highest = (of: (node: ModuleNode) => number): number =>
    rows.reduce((top, { node }) => Math.max(top, of(node)), 0);
  const times = columns.filter((c) => c.kind === "time");
  const longest = highest((node) => Math.max(...times.map((c) => c.value(node, at) ?? 0)));
  return {
    largest: new Map(columns.filter((c) => c.heat).map((c) => [c.id, highest((node) => c.value(node, at) ?? 0)])),
    widest: highest((node) => sumOf(node, at)),
    clock: timeUnitFor(longest / 4),
  };
}

function sumOf(node: ModuleNode, at: At): number {
  return Object.values(categoriesAt(node, at)).reduce((s, b) => s + b, 0);
}

interface HeadProps {
  id: string;
  label: string;
  title: string;
  sorting: Sorting | null;
  onSort: (id: string) => void;
  number?: boolean;
}

function Head({ id, label, title, sorting, onSort, number = false }: HeadProps) {
  const current = sorting?.id === id ? sorting : null;
  return (
    <th
      scope="col"
      class={number ? "number" : undefined}
      aria-sort={current ? (current.descending ? "descending" : "ascending") : undefined}
    >
      <button type="button" title={title} data-testid={`sort-${id}`} onClick={() => onSort(id)}>
        {label}
        {current ? (current.descending ? " ▾" : " ▴") : ""}
      </button>
    </th>
  );
}

/** Pixels. Deep rows move less, and at last no further, so that their names keep room. */
function indentOf(depth: number): number {
  const deeper = Math.min(Math.max(0, depth - 6), 8);
  return 16 * Math.min(depth, 6) + 3 * deeper;
}

function NameCell({ row, onFlip }: { row: VisibleRow; onFlip: (node: ModuleNode) => void }) {
  const { node, depth, open } = row;
  const indent = { paddingLeft: `${indentOf(depth)}px` };
  if (row.own)
    return (
      <th scope="row">
        <div style={indent}>
          <span class="leaf muted" title="What it holds outside the modules inside it">
            itself
          </span>
        </div>
      </th>
    );
  const inside = (
    <>
      <Name text={node.label} module />
      {node.layers !== null && <span class="times">×{node.layers}</span>}
      {node.className && (
        <span class="class" title={titleText(node.className)}>
          {titleText(node.className).slice(0, 60)}
        </span>
      )}
    </>
  );
  return (
    <th scope="row">
      <div style={indent}>
        {node.children.length > 0 ? (
          <Fold open={open} onFlip={() => onFlip(node)}>
            {inside}
          </Fold>
        ) : (
          <span class="leaf">{inside}</span>
        )}
      </div>
    </th>
  );
}

function Cell({
  column,
  node,
  at,
  unit,
  largest,
  clock,
}: {
  column: Column;
  node: ModuleNode;
  at: At;
  unit: Unit;
  largest: number;
  clock: TimeUnit;
}) {
  const value = column.value(node, at);
  if (!isKnown(column, value))
    return (
      <td class="number zero" title={column.call ? "No such call began in this step, or the side file is missing" : "Not known"}>
        –
      </td>
    );
  if (column.kind === "count") return <td class="number muted">{grouped(value)}</td>;
  if (column.kind === "time")
    return (
      <td class="number muted" title={exactTime(value)}>
        {inTimeUnit(value, clock)}
      </td>
    );
  const share = column.heat && largest > 0 ? (100 * value) / largest : 0;
  const call = column.call?.(node);
  const text = <span>{value === 0 ? "0.00" : inUnit(value, unit)}</span>;
  const tone = value === 0 ? "number zero heat" : column.id === "bytes" ? "number strong heat" : "number heat";
  return (
    <td class={tone} title={exactBytes(value)}>
      {share >= 4 && <i style={{ width: `calc((100% - 12px) * ${(share / 100).toFixed(3)})` }} />}
      {call ? (
        <RouteLink to={timelineOf(call)} testid={column.id}>
          {text}
        </RouteLink>
      ) : (
        text
      )}
    </td>
  );
}

/** The Timeline of one call, at its highest moment. */
function timelineOf({ start_ns, end_ns }: NonNullable<ModuleNode["inForward"]>): RoutePatch {
  const stretch = { t0: String(start_ns), t1: String(end_ns) };
  return { view: "timeline", over: undefined, t: undefined, event: undefined, mark: undefined, ...stretch };
}
