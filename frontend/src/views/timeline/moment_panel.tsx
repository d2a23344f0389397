import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { CompareAnswer, LabelledPart, MomentAnswer, Part, StepAnswer } from "../../api/types";
import { base, isAlone, navigate, picked, route } from "../../state/app";
import { exactBytes, inUnit, percent, type Unit, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import { CATEGORIES, categoryLabel } from "../../state/categories";
import { withOpened } from "../../state/module_groups";
import { NOT_NAMED, shortened, titleText, visible } from "../../state/names";
import { knownPhase, sideName } from "../../state/sentences";
import { duration, exactTime } from "../../state/time";
import { Delta } from "../amount";
import { Swatch } from "../category";
import { divisionLabel, isOurs, partLabel } from "../divisions";
import { Name } from "../name";
import { allocationName } from "../overview/largest";
import type { Pick, RecordedWindow } from "../../state/selection";
import type { Cursor } from "./cursor";

interface Props {
  by: string;
  cursor: Cursor;
  origin: number;
  peakBytes: number;
  /** The steps of a whole window, where that is shown. */
  within: RecordedWindow | undefined;
}

/** The state at the cursor: at once from the curve, then exactly from the server. */
export function MomentPanel({ by, cursor, origin, peakBytes, within }: Props) {
  const { moment, time } = cursor;
  const exact = moment.data && !moment.stale ? moment.data : undefined;
  const parts: LabelledPart[] = exact ? partsOf(exact, by) : cursor.approximate.map((p) => ({ ...p, count: 0 }));
  const waiting = !exact && parts.length === 0;
  const bytes = exact ? exact.bytes : waiting ? peakBytes : parts.reduce((s, p) => s + p.bytes, 0);
  const unit = unitFor(peakBytes);
  const step = time === undefined ? undefined : within?.steps.find((one) => time >= one.start && time <= one.end);
  return (
    <aside class="card side" data-testid="moment-panel" data-exact={exact ? "true" : "false"} aria-live="off">
      <h2>
        {time === undefined ? (
          "At the peak"
        ) : (
          <span title={exactTime(time - origin)}>
            {cursor.atPeak ? "At the peak, " : "At "}
            {duration(time - origin)}
          </span>
        )}{" "}
        {exact && exact.event >= 0 && <span class="approx">event {grouped(exact.event)}</span>}
        {step && <span class="approx"> · step {step.step}</span>}
      </h2>
      <div class="big amount" title={exactBytes(bytes)}>
        {withUnit(bytes, unit)}
      </div>
      <p class="where">
        {exact ? (
          <Where moment={exact} />
        ) : moment.failure ? (
          moment.failure.what
        ) : waiting ? (
          "reading what it is made of …"
        ) : (
          "from the curve: this column's highest"
        )}
      </p>
      {!waiting && <Breakdown by={by} parts={parts} unit={unit} cursor={cursor} alone={within !== undefined} />}
      <p class="unseen" role="status">
        {exact && cursor.pinned && !cursor.hovering && `${withUnit(bytes, unit)} after event ${grouped(exact.event)}`}
      </p>
      {exact && <Alive moment={exact} page={unit} />}
      <div class="buttons">
        <button
          type="button"
          class="small"
          data-testid="event-previous"
          disabled={!exact || exact.previous_event_ns === null}
          onClick={() => cursor.step(-1)}
        >
          ← event
        </button>
        <button
          type="button"
          class="small"
          data-testid="event-next"
          disabled={!exact || exact.next_event_ns === null}
          onClick={() => cursor.step(1)}
        >
          event →
        </button>
        {!cursor.atPeak && !waiting && (
          <button type="button" class="small" data-testid="to-peak" onClick={() => cursor.pin(undefined)}>
            to the peak
          </button>
        )}
      </div>
    </aside>
  );
}

function Where({ moment }: { moment: MomentAnswer }) {
  const phase = knownPhase(moment.phase, moment.by_phase);
  const { operator } = moment;
  const told = moment.module === NOT_NAMED || moment.module === `outside:${operator}`; // the operator says it
  const module = told ? null : moment.module;
  return (
    <>
      {phase ?? (module === null && !operator ? "phase and module not known" : "phase not known")}
      {module !== null && (
        <>
          {" "}
          · in <Name text={module} module chip />
        </>
      )}
      {operator && (
        <>
          <br />
          <Name text={operator} chip />
        </>
      )}
      {moment.reserved !== null && (
        <>
          <br />
          reserved {withUnit(moment.reserved)}
        </>
      )}
    </>
  );
}

function partsOf(moment: MomentAnswer, by: Props["by"]): LabelledPart[] {
  if (moment.parts) return moment.parts;
  const parts = by === "phase" ? moment.by_phase : moment.by_category;
  return parts.map((part) => ({ ...part, label: part.key }));
}

const MOST = 14;
const OTHERS = ["(other modules)", "(others)"];

interface BreakdownProps {
  by: Props["by"];
  parts: LabelledPart[];
  unit: Unit;
  cursor: Cursor;
  /** Of a whole window: there is nothing to hold it against. */
  alone: boolean;
}

/** One row per part, in the curve's order from the top; beside it the change against the base or the peak. */
function Breakdown({ by, parts, unit, cursor, alone }: BreakdownProps) {
  const pick = picked.value!;
  const folded = cursor.groups.size > 0;
  const basis = alone || folded ? null : meant(base.value, pick);
  const query = basis && {
    base_run: basis.run,
    base_worker: basis.worker,
    base_step: basis.step,
    base_device: basis.device,
  };
  const change = useRemote<CompareAnswer>(
    cursor.atPeak && query ? address("compare", { by, ...pick, ...query }) : null,
  );
  const peak = useRemote<StepAnswer>(cursor.atPeak || alone || folded ? null : address("step", pick));
  const deltas = cursor.atPeak
    ? change.data && new Map(change.data.rows.map((row) => [row.key, row.delta_bytes]))
    : peak.data && deltasTo(parts, peak.data.peak, by);
  const compared = cursor.atPeak ? basis !== null : !alone && !folded && (peak.loading || deltas !== undefined);
  const against = basis && cursor.atPeak ? sideName({ ...basis, alone: isAlone(basis) }, pick) : "peak";
  const heading = compared ? `vs ${against}` : "share";
  const all = parts.reduce((s, p) => s + p.bytes, 0);
  const order = cursor.approximate.map((p) => p.key);
  const sorted =
    folded
      ? [...parts].sort((a, b) => order.indexOf(a.key) - order.indexOf(b.key))
      : by === "category"
      ? [...parts].sort((a, b) => rank(b.key) - rank(a.key))
      : [...parts].sort((a, b) => b.bytes - a.bytes);
  const alive = sorted.filter((p) => p.bytes > 0);
  const shown = alive.filter((p, i) => (isOurs(by) ? i < MOST : order.includes(p.key) && !OTHERS.includes(p.key)));
  const rest = alive.filter((p) => !shown.includes(p));
  const others = !isOurs(by) && rest.length > 0;
  const many = by === "module" ? "modules" : "parts";
  const restBytes = rest.reduce((s, p) => s + p.bytes, 0);
  return (
    <table class={folded ? "plain tight" : compared ? "plain compared" : "plain"}>
      <thead>
        <tr>
          <th scope="col">{divisionLabel(by).toLowerCase()}</th>
          <th scope="col" class="number">
            {unit.name}
          </th>
          <th scope="col" class="number" title={heading}>
            {basis && cursor.atPeak && basis.run !== pick.run ? `vs ${shortened(visible(basis.run), 10)}` : heading}
          </th>
        </tr>
      </thead>
      <tbody>
        {shown.map((part) => (
          <tr key={part.key} data-testid="moment-row" data-key={part.key}>
            <th scope="row">
              <span class="flexed">
                <Swatch by={by} of={part.key} index={Math.max(0, order.indexOf(part.key))} />
                {cursor.groups.has(part.key) ? (
                  <Group part={part} {...cursor.groups.get(part.key)!} />
                ) : isOurs(by) ? categoryLabel(part.key) : <Name text={partLabel(by, part.label)} title={by === "stack" ? part.key : undefined} />}
              </span>
            </th>
            <td class="number" title={exactBytes(part.bytes)}>
              {inUnit(part.bytes, unit)}
            </td>
            <td class="number">
              {deltas && compared && <Delta bytes={deltas.get(part.key) ?? 0} unit={unit} />}
              {!compared && <span class="muted">{percent(part.bytes, all)}</span>}
            </td>
          </tr>
        ))}
        {rest.length > 0 && (
          <tr data-testid="moment-rest">
            <th scope="row" class="muted">
              {others && <Swatch by={by} of={OTHERS[0]!} />}
              {rest.some((p) => OTHERS.includes(p.key))
                ? `other ${many}`
                : others
                  ? `${grouped(rest.length)} other ${many}`
                  : `${grouped(rest.length)} more`}
            </th>
            <td class="number muted" title={exactBytes(restBytes)}>
              {inUnit(restBytes, unit)}
            </td>
            <td class="number muted">{!compared && percent(restBytes, all)}</td>
          </tr>
        )}
      </tbody>
    </table>
  );
}

/** A group of modules: a click opens it into what is inside, or into its layers. */
function Group({ part, modules, opens }: { part: LabelledPart; modules: number; opens: boolean }) {
  const name = <Name text={partLabel("module", part.label)} module />;
  if (!opens) return name;
  return (
    <button
      type="button"
      class="fold"
      data-testid="open-group"
      title={`${titleText(part.key)}: ${grouped(modules)} modules. Click to see them apart.`}
      onClick={() => navigate({ opened: withOpened(route.value.opened, part.key) })}
    >
      <span class="caret" aria-hidden="true">
        ▸
      </span>
      {name}
    </button>
  );
}

/** Another run is held against this one only where someone asked for it. */
function meant(basis: Pick | null, pick: Pick): Pick | null {
  return basis && (basis.run === pick.run || route.value.base_run !== undefined) ? basis : null;
}

function rank(key: string): number {
  const at = (CATEGORIES as readonly string[]).indexOf(key);
  return at < 0 ? CATEGORIES.length : at;
}

function deltasTo(parts: LabelledPart[], peak: StepAnswer["peak"], by: string): Map<string, number> | undefined {
  const known: Record<string, Part[]> = {
    category: peak.by_category,
    module: peak.by_module,
    phase: peak.by_phase,
    operator: peak.by_operator,
  };
  const at = known[by] && new Map(known[by].map((p) => [p.key, p.bytes]));
  if (!at) return undefined;
  return new Map(parts.map((p) => [p.key, p.bytes - (at.get(p.key) ?? 0)]));
}

function Alive({ moment, page }: { moment: MomentAnswer; page: Unit }) {
  if (moment.largest.length === 0) return null;
  const unit = unitWithin(page, moment.largest[0]!.bytes);
  return (
    <>
      <h3>Largest alive, {unit.name}</h3>
      <table class="plain large-list">
        <tbody>
          {moment.largest.slice(0, 5).map((a, i) => (
            <tr key={i}>
              <td class="number" title={exactBytes(a.bytes)}>
                {inUnit(a.bytes, unit)}
              </td>
              <td>
                <span class="flexed">
                  <Swatch of={a.category} />
                  <Name text={allocationName(a)} />
                </span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}
