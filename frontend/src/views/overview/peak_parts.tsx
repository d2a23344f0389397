import { useMemo, useState } from "preact/hooks";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { Categories, LineTableAnswer, Part, StepAnswer } from "../../api/types";
import { picked } from "../../state/app";
import { exactBytes, inUnit, percent, type Unit, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { categoryLabel } from "../../state/categories";
import { type FoldedPart, foldParts, layerOf, opened } from "../../state/folding";
import { searchFor } from "../../state/frames";
import { isModule, NOT_NAMED } from "../../state/names";
import { counted, grouped } from "../../state/numbers";
import { BytesCell } from "../amount";
import { CategoryBar, Swatch } from "../category";
import { Fold } from "../fold";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { useRowKeys } from "../row_keys";
import { Line } from "../stacks/ranked";
import { Heads, ShareBar } from "../table";

const FEW = 10;

/** The peak's modules, repeated layers in one row that opens on a click. */
export function ByModule({ peak }: { peak: StepAnswer["peak"] }) {
  const [all, setAll] = useState(false);
  const rows = useMemo(() => foldParts(peak.by_module), [peak.by_module]);
  const whole = unitFor(peak.bytes);
  const unit = unitWithin(whole, rows[0]?.bytes ?? 0);
  const sum = together(rows);
  const shown = all ? rows.slice(0, 300) : rows.slice(0, FEW);
  const rest = rows.slice(shown.length);
  const full = rows[0]?.bytes ?? 0;
  const keys = useRowKeys();
  return (
    <section class="card" data-testid="by-module">
      <h2>In the peak, by module</h2>
      <table class="plain modules-short">
        <Heads columns={["module", { unseen: "categories", wide: true }, { number: unit.name }]} />
        <tbody {...keys}>
          {shown.map((row) => (
            <ModuleLine key={row.key} row={row} unit={unit} full={full} />
          ))}
          {rest.length > 0 && (
            <tr>
              <td colSpan={2}>
                {all ? (
                  <RouteLink to={{ view: "modules" }}>{grouped(rest.length)} more in Modules</RouteLink>
                ) : (
                  <button type="button" class="quiet" onClick={() => setAll(true)}>
                    {counted(rest.length, "more row")}
                  </button>
                )}
              </td>
              <td class="number muted" data-testid="module-rest" title={exactBytes(together(rest))}>
                {inUnit(together(rest), unit)}
              </td>
            </tr>
          )}
        </tbody>
      </table>
      <p class="foot" data-testid="module-sum" title={exactBytes(sum)}>
        each without the modules inside it · {percent(named(peak.by_module), peak.bytes)} belong to a module · parts sum
        to <span class="amount">{withUnit(sum, whole)}</span>
      </p>
    </section>
  );
}

/** How many layers of an opened row are listed here. */
const MOST_INNER = 200;

function named(parts: Part[]): number {
  return together(parts.filter((part) => isModule(part.key)));
}

const INDENT = 20;

interface LineProps {
  row: FoldedPart;
  unit: Unit;
  full: number;
  /** How many opened rows it stands in, and the innermost of these. */
  depth?: number;
  within?: string;
}

function ModuleLine({ row, unit, full, depth = 0, within }: LineProps) {
  const [open, setOpen] = useState(false);
  const folded = row.members.length > 1;
  const layers = useMemo(() => (open ? opened(row) : []), [open, row]);
  const indented = (depth: number): { paddingLeft: string } | undefined =>
    depth > 0 ? { paddingLeft: `${depth * INDENT}px` } : undefined;
  const name =
    within === undefined ? <Name text={row.key} module /> : <Name text={layerOf(row.key, within)} title={row.key} />;
  return (
    <>
      <tr class={depth > 0 ? "inner" : undefined} data-testid="module-row" data-key={row.key}>
        <th scope="row" style={indented(depth)}>
          {folded ? (
            <Fold open={open} onFlip={() => setOpen(!open)}>
              {name} <span class="times">×{grouped(row.members.length)}</span>
            </Fold>
          ) : (
            <RouteLink
              to={{ view: "modules", find: row.key.startsWith("outside:") ? row.key : row.key || undefined }}
              class="indent"
            >
              {name}
            </RouteLink>
          )}
        </th>
        <td class="wide">
          <CategoryBar categories={row.categories} full={full} unit={unit} />
        </td>
        <BytesCell bytes={row.bytes} unit={unit} tone={depth > 0 ? "muted" : undefined} />
      </tr>
      {layers.slice(0, MOST_INNER).map((layer) => (
        <ModuleLine key={layer.key} row={layer} unit={unit} full={full} depth={depth + 1} within={row.key} />
      ))}
      {layers.length > MOST_INNER && (
        <tr class="inner">
          <td colSpan={2} style={indented(depth + 1)}>
            <RouteLink to={{ view: "modules", find: row.key }} class="indent">
              {grouped(layers.length - MOST_INNER)} more in Modules
            </RouteLink>
          </td>
          <BytesCell bytes={together(layers.slice(MOST_INNER))} unit={unit} tone="muted" />
        </tr>
      )}
    </>
  );
}

function together(parts: { bytes: number }[]): number {
  return parts.reduce((s, part) => s + part.bytes, 0);
}

/** The peak's categories: one bar, and the same as a table that sums to it. */
export function ByCategory({ peak }: { peak: StepAnswer["peak"] }) {
  const unit = unitFor(peak.bytes);
  const categories: Categories = Object.fromEntries(peak.by_category.map((p) => [p.key, p.bytes]));
  const sum = peak.by_category.reduce((s, p) => s + p.bytes, 0);
  return (
    <section class="card" data-testid="by-category">
      <h2>In the peak, by category</h2>
      <CategoryBar categories={categories} full={peak.bytes} unit={unit} tall />
      <table class="plain">
        <Heads columns={["category", { number: unit.name }, { number: "share" }, { number: "allocations" }]} />
        <tbody>
          {peak.by_category.map((part) => (
            <tr key={part.key} data-testid="category-row" data-key={part.key}>
              <th scope="row">
                <Swatch of={part.key} />
                <RouteLink to={{ view: "timeline", by: "category", t: String(peak.time_ns) }}>
                  {categoryLabel(part.key)}
                </RouteLink>
              </th>
              <BytesCell bytes={part.bytes} unit={unit} />
              <td class="number muted">{percent(part.bytes, peak.bytes)}</td>
              <td class="number muted">{grouped(part.count)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="foot" title={exactBytes(sum)} data-testid="category-sum">
        parts sum to {withUnit(sum, unit)}
      </p>
    </section>
  );
}

/** A trace that names no module is divided by the lines of code that allocated, else by operators; nothing where neither is known. */
export function ByLine({ peak }: { peak: StepAnswer["peak"] }) {
  const pick = picked.value!;
  const answer = useRemote<LineTableAnswer>(address("line_table", { ...pick, event: peak.event, count: FEW }));
  const data = answer.data;
  const known = data?.rows.some((row) => row.kind !== "none");
  const named = peak.by_module.some((part) => part.key !== NOT_NAMED);
  if (answer.failure || (data && !known)) return named ? <ByModule peak={peak} /> : null;
  if (!data) return <section class="card" aria-busy="true" />;
  const unit = unitFor(peak.bytes);
  const full = data.rows[0]?.bytes ?? 0;
  const rest = data.bytes - data.rows.reduce((sum, row) => sum + row.bytes, 0);
  const without = data.rows.find((row) => row.kind === "none")?.bytes ?? 0;
  return (
    <section class="card" data-testid="by-line">
      <h2>In the peak, by source line</h2>
      <table class="plain modules-short lines">
        <Heads columns={["source line", { unseen: "share", wide: true }, { number: unit.name }]} />
        <tbody>
          {data.rows.map((row) => (
            <tr key={row.line} data-testid="line-row" data-key={row.line}>
              <th scope="row">
                {row.kind === "none" ? (
                  <Line line={row.line} kind={row.kind} />
                ) : (
                  <RouteLink to={{ view: "stacks", search: searchFor(row.line) }} class="plain-link">
                    <Line line={row.line} kind={row.kind} />
                  </RouteLink>
                )}
              </th>
              <td class="wide">
                <ShareBar share={row.bytes / full} kind={row.kind} />
              </td>
              <BytesCell bytes={row.bytes} unit={unit} />
            </tr>
          ))}
          {data.rows_found > data.rows.length && (
            <tr>
              <td colSpan={2}>
                <RouteLink to={{ view: "stacks", table: "lines" }}>{data.rows_found - data.rows.length} more lines in Stacks</RouteLink>
              </td>
              <BytesCell bytes={rest} unit={unit} tone="muted" />
            </tr>
          )}
        </tbody>
      </table>
      <p class="foot">
        <RouteLink to={{ view: "stacks" }}>All call stacks</RouteLink>
        {without > 0 && ` · ${percent(without, data.bytes)} have none`} · lines sum to {withUnit(data.bytes, unit)}
      </p>
    </section>
  );
}
