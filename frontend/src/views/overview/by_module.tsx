import { useMemo, useState } from "preact/hooks";
import type { Part, StepAnswer } from "../../api/types";
import { exactBytes, inUnit, percent, type Unit, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { type FoldedPart, foldParts } from "../../state/folding";
import { grouped } from "../../state/numbers";
import { CategoryBar } from "../category";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { walkRows } from "../row_keys";

const FEW = 10;

/** The peak's modules, repeated layers in one row that opens on a click. */
export function ByModule({ peak }: { peak: StepAnswer["peak"] }) {
  const [all, setAll] = useState(false);
  const rows = useMemo(() => foldParts(peak.by_module), [peak.by_module]);
  const whole = unitFor(peak.bytes);
  const unit = unitWithin(whole, rows[0]?.bytes ?? 0);
  const sum = rows.reduce((s, row) => s + row.bytes, 0);
  const shown = all ? rows.slice(0, 300) : rows.slice(0, FEW);
  const rest = rows.slice(shown.length);
  const full = rows[0]?.bytes ?? 0;
  return (
    <section class="card" data-testid="by-module">
      <h2>In the peak, by module</h2>
      <table class="plain modules-short">
        <thead>
          <tr>
            <th scope="col">module</th>
            <th scope="col" class="wide">
              <span class="unseen">categories</span>
            </th>
            <th scope="col" class="number">
              {unit.name}
            </th>
          </tr>
        </thead>
        <tbody onKeyDown={walkRows}>
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
                    {grouped(rest.length)} more {rest.length === 1 ? "row" : "rows"}
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
        {percent(named(peak.by_module), peak.bytes)} of the bytes belong to a module · parts sum to{" "}
        {withUnit(sum, whole)}
      </p>
    </section>
  );
}

/** Of a folded row, members that are listed here. */
const MOST_INNER = 200;

function named(parts: Part[]): number {
  return parts.filter((p) => !p.key.startsWith("outside:") && p.key !== "(not named)").reduce((s, p) => s + p.bytes, 0);
}

function ModuleLine({ row, unit, full }: { row: FoldedPart; unit: Unit; full: number }) {
  const [open, setOpen] = useState(false);
  const folded = row.members.length > 1;
  return (
    <>
      <tr data-testid="module-row" data-key={row.key}>
        <th scope="row">
          {folded ? (
            <button type="button" class="fold" aria-expanded={open} onClick={() => setOpen(!open)}>
              <span class="caret" aria-hidden="true">
                {open ? "▾" : "▸"}
              </span>
              <Name text={row.key} module /> <span class="times">×{row.members.length}</span>
            </button>
          ) : (
            <RouteLink
              to={{ view: "modules", find: row.key.startsWith("outside:") ? row.key : row.key || undefined }}
              class="indent"
            >
              <Name text={row.key} module />
            </RouteLink>
          )}
        </th>
        <td class="wide">
          <CategoryBar categories={row.categories} full={full} unit={unit} />
        </td>
        <td class="number" title={exactBytes(row.bytes)}>
          {inUnit(row.bytes, unit)}
        </td>
      </tr>
      {open &&
        row.members.slice(0, MOST_INNER).map((part) => (
          <tr key={part.key} class="inner" data-testid="module-row" data-key={part.key}>
            <th scope="row">
              <RouteLink to={{ view: "modules", find: part.key }} class="indent">
                <Name text={part.key} module />
              </RouteLink>
            </th>
            <td class="wide">
              <CategoryBar categories={part.categories ?? {}} full={full} unit={unit} />
            </td>
            <td class="number muted" title={exactBytes(part.bytes)}>
              {inUnit(part.bytes, unit)}
            </td>
          </tr>
        ))}
      {open && row.members.length > MOST_INNER && (
        <tr class="inner">
          <td colSpan={2}>
            <RouteLink to={{ view: "modules", find: row.key }} class="indent">
              {grouped(row.members.length - MOST_INNER)} more in Modules
            </RouteLink>
          </td>
          <td class="number muted" title={exactBytes(together(row.members.slice(MOST_INNER)))}>
            {inUnit(together(row.members.slice(MOST_INNER)), unit)}
          </td>
        </tr>
      )}
    </>
  );
}

function together(parts: { bytes: number }[]): number {
  return parts.reduce((s, part) => s + part.bytes, 0);
}
