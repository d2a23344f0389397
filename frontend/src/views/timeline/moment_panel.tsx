import type { LabeledPart, MomentAnswer, Over } from "../../api/types";
import { exactBytes, inUnit, type Unit, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { counted, grouped } from "../../state/numbers";
import { lineParts } from "../../state/frames";
import { allocationName, NOT_NAMED, titleText } from "../../state/names";
import { knownPhase } from "../../state/sentences";
import { duration, exactTime } from "../../state/time";
import { Delta } from "../amount";
import { Swatch } from "../category";
import { EventButtons } from "../event_buttons";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { Tensor } from "../tensor";
import type { RecordedWindow } from "../../state/selection";
import { Breakdown } from "./breakdown";
import { partsOf } from "./change";
import type { Cursor } from "./cursor";

interface Props {
  by: string;
  over: Over;
  cursor: Cursor;
  origin: number;
  peakBytes: number;
  /** The steps of a whole window, where that is shown. */
  within: RecordedWindow | undefined;
}

/** The state at the cursor: at once from the curve, then exactly from the server. */
export function MomentPanel({ by, over, cursor, origin, peakBytes, within }: Props) {
  const { moment, place } = cursor;
  const exact = moment.data && !moment.stale && isOfTheCurve(moment.data, cursor) ? moment.data : undefined;
  const parts: LabeledPart[] = exact ? partsOf(exact, by) : cursor.approximate.map((p) => ({ ...p, count: 0 }));
  const waiting = !exact && parts.length === 0;
  const bytes = exact ? exact.bytes : waiting ? peakBytes : parts.reduce((s, p) => s + p.bytes, 0);
  const unit = unitFor(peakBytes);
  const time = over === "time" ? place : exact?.time_ns;
  const event = exact ? exact.event : over === "event" && place !== undefined ? Math.floor(place) : -1;
  const step = time === undefined ? undefined : within?.steps.find((one) => time >= one.start && time <= one.end);
  return (
    <aside class="card side" data-testid="moment-panel" data-exact={exact ? "true" : "false"} aria-live="off">
      <h2>
        {time === undefined ? (
          cursor.atPeak || place === undefined ? "At the peak" : "At"
        ) : (
          <span title={exactTime(time - origin)}>
            {cursor.atPeak ? "At the peak, " : "At "}
            {duration(time - origin)}
          </span>
        )}{" "}
        {event >= 0 && <span class="approx">event {grouped(event)}</span>}
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
      {cursor.mark && <SinceMark mark={cursor.mark} moment={exact} origin={origin} page={unit} />}
      {!waiting && (
        <Breakdown by={by} parts={parts} exact={exact !== undefined} unit={unit} cursor={cursor} alone={within !== undefined} />
      )}
      <p class="unseen" role="status">
        {exact && cursor.pinned && !cursor.hovering && `${withUnit(bytes, unit)} after event ${grouped(exact.event)}`}
      </p>
      {exact && <Alive moment={exact} page={unit} />}
      <EventButtons
        before={exact !== undefined && exact.previous_event_ns !== null}
        after={exact !== undefined && exact.next_event_ns !== null}
        onStep={cursor.step}
        onPeak={!cursor.atPeak && !waiting && (() => cursor.pin(undefined))}
      >
        <button
          type="button"
          class="small"
          data-testid="flip-mark"
          title="Compare other moments with one that you mark. Key M in the picture."
          disabled={!exact && !cursor.mark}
          onClick={cursor.flipMark}
        >
          {cursor.mark ? "forget the mark" : "mark this moment"}
        </button>
      </EventButtons>
    </aside>
  );
}

/** Where a group was just opened or folded, the moment may come before the curve, whose groups are the rows. */
function isOfTheCurve({ parts }: MomentAnswer, { groups }: Cursor): boolean {
  return groups.size === 0 || (parts ?? []).every((part) => groups.has(part.key));
}

/** Phases whose keys are no words for a moment. */
const OUTSIDE: Record<string, string> = {
  before: "before the first event",
  other: "outside forward, backward and optimizer",
};

function Where({ moment }: { moment: MomentAnswer }) {
  const known = knownPhase(moment.phase, moment.by_phase);
  const phase = known === null ? null : (OUTSIDE[known] ?? known);
  const { operator } = moment;
  const saysNothingMore = moment.module === NOT_NAMED || moment.module === `outside:${operator}`;
  const module = saysNothingMore ? null : moment.module;
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

interface SinceProps {
  mark: NonNullable<Cursor["mark"]>;
  /** The exact state at the cursor, once it is known. */
  moment: MomentAnswer | undefined;
  origin: number;
  page: Unit;
}

/** How the moment differs from the marked one: what came and stayed, and what went. */
function SinceMark({ mark, moment, origin, page }: SinceProps) {
  const then = mark.moment.stale ? undefined : mark.moment.data;
  if (!then) return null;
  const place = (
    <span title={`${exactTime(then.time_ns - origin)}, event ${grouped(mark.event)}, ${exactBytes(then.bytes)}`}>
      the mark at {duration(then.time_ns - origin)}
    </span>
  );
  const since = moment?.since;
  const more = moment === undefined ? 0 : moment.bytes - then.bytes;
  return (
    <p class="where" data-testid="since-mark">
      {moment === undefined ? (
        <>held against {place}</>
      ) : moment.event === mark.event ? (
        <>This is {place}. Point at another moment.</>
      ) : (
        <>
          {more === 0 ? "no change" : <Delta bytes={more} unit={page} named />} {since ? "since" : "against"} {place}
        </>
      )}
      {since && (
        <>
          : <Sum bytes={since.kept_bytes} count={since.kept} page={page} testid="kept" /> allocated and still alive,{" "}
          <Sum bytes={since.freed_bytes} count={since.freed} page={page} testid="freed" /> freed
        </>
      )}
    </p>
  );
}

interface SumProps {
  bytes: number;
  count: number;
  page: Unit;
  testid: string;
}

function Sum({ bytes, count, page, testid }: SumProps) {
  return (
    <strong title={`${exactBytes(bytes)} in ${counted(count, "allocation")}`} data-testid={testid}>
      {withUnit(bytes, unitWithin(page, bytes))}
    </strong>
  );
}

/** What an allocation is called; where nothing names it, the code that asked for it, else where it lies. */
function nameOrLine(a: MomentAnswer["largest"][number]): string {
  return allocationName(a) ?? (a.line === null ? a.address : lineParts(a.line).place);
}

function Alive({ moment, page }: { moment: MomentAnswer; page: Unit }) {
  if (moment.largest.length === 0) return null;
  const unit = unitWithin(page, moment.largest[0]!.bytes);
  return (
    <>
      <h3>
        Largest {moment.since ? "of these" : "alive"}, {unit.name}
      </h3>
      <table class="plain large-list">
        <tbody>
          {moment.largest.slice(0, moment.since ? 10 : 5).map((a, i) => (
            <tr key={i}>
              <td class="number" title={exactBytes(a.bytes)}>
                {inUnit(a.bytes, unit)}
              </td>
              <td>
                <span class="flexed" title={titleText(a.why)}>
                  <Swatch of={a.category} />
                  <RouteLink to={{ view: "allocations", block: String(a.row) }}>
                    <Name text={nameOrLine(a)} />
                  </RouteLink>
                  <Tensor text={a.tensor} />
                </span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}
