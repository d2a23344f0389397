import type { LabeledPart, MomentAnswer, Over } from "../../api/types";
import { exactBytes, type Unit, unitFor, unitWithin, withUnit } from "../../state/bytes";
import { counted, grouped } from "../../state/numbers";
import { NOT_NAMED } from "../../state/names";
import { knownPhase } from "../../state/sentences";
import { duration, exactTime } from "../../state/time";
import { Delta } from "../amount";
import { EventButtons } from "../event_buttons";
import { Name } from "../name";
import type { RecordedWindow } from "../../state/selection";
import { Breakdown } from "./breakdown";
import { LargeAllocations } from "./large_allocations";
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
            {cursor.atPeak ? "At the peak, " : cursor.atHighest ? "Highest shown, at " : "At "}
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
      {exact && (
        <LargeAllocations
          title={`Largest ${exact.since ? "of these" : "alive"}`}
          rows={exact.largest.slice(0, exact.since ? 10 : 5)}
          page={unit}
          coloured={by === "category"}
        />
      )}
      <EventButtons
        before={exact !== undefined && exact.previous_event_ns !== null}
        after={exact !== undefined && exact.next_event_ns !== null}
        onStep={cursor.step}
        onPeak={!cursor.atPeak && !waiting && cursor.toPeak}
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
