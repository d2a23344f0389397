import type { AllocatorState } from "../../api/types";
import { asPartOf, exactBytes, percent, unitFor, withUnit } from "../../state/bytes";
import { cellText, titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import { duration, exactTime } from "../../state/time";
import { EventButtons } from "../event_buttons";
import type { ShownMoment } from "./moment";
import { BytesCell } from "../amount";
import { Fact } from "../fact";
import { Heads } from "../table";

interface Props {
  moment: ShownMoment;
  peak: { event: number; time_ns: number } | undefined;
  origin: number;
}

const KINDS: Record<string, string> = {
  alloc: "allocated",
  free_completed: "freed",
  free_requested: "marked to be freed",
  storage_free: "freed",
  segment_alloc: "reserved from the device",
  segment_map: "reserved from the device",
  segment_free: "given back to the device",
  segment_unmap: "given back to the device",
  oom: "requested and refused",
};

/** The allocator's numbers at the moment: parts of the reserve that sum to it. */
export function StatePanel({ moment, peak, origin }: Props) {
  const state = moment.state.data;
  const { failed } = moment;
  if (!state) return <aside class="card side" aria-busy="true" data-testid="allocator-panel" data-exact="false" />;
  const unit = unitFor(state.reserved_bytes ?? state.active_bytes);
  const of = state.reserved_bytes ?? state.active_bytes;
  return (
    <aside
      class="card side"
      data-testid="allocator-panel"
      data-exact={moment.state.stale ? "false" : "true"}
      data-event={state.event}
    >
      <h2>
        <span title={exactTime(state.time_ns - origin)}>
          {state.event === failed?.event ? "Out of memory, " : moment.atPeak ? "At the peak, " : "At "}
          {duration(state.time_ns - origin)}
        </span>{" "}
        <span class="approx">{state.event < 0 ? "before the first event" : `event ${grouped(state.event)}`}</span>
      </h2>
      <div class="big amount" title={exactBytes(of)}>
        {withUnit(of, unit)} <span class="approx">{state.reserved_bytes === null ? "allocated" : "reserved"}</span>
      </div>
      <What state={state} />
      <table class="plain">
        <Heads columns={["of which", { number: unit.name }, { number: "share" }]} />
        <tbody>
          {partsOf(state).map(({ key, label, bytes, title }) => (
            <tr key={key} data-testid="allocator-part" data-key={key}>
              <th scope="row" title={title}>
                <span class={`swatch level-${key}`} aria-hidden="true" />
                {label}
              </th>
              <BytesCell bytes={bytes} unit={unit} />
              <td class="number muted">{percent(bytes, of)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <Waste state={state} of={of} />
      <EventButtons
        before={state.previous_event !== null}
        after={state.next_event !== null}
        onStep={moment.step}
        onPeak={peak && !moment.atPeak && (() => moment.show(peak.event, peak.time_ns))}
      />
    </aside>
  );
}

interface Level {
  key: string;
  label: string;
  bytes: number;
  title: string;
}

/** What the reserve is made of. What cannot be placed is a row too, so that the rows sum to it. */
function partsOf(state: AllocatorState): Level[] {
  const rows: Level[] = [
    { key: "allocated", label: "allocated", bytes: state.allocated_bytes, title: "Requested, and in use" },
  ];
  const pending = { key: "pending", label: "pending", bytes: state.pending_bytes, title: "Free requested, not completed" };
  if (state.pending_bytes > 0) rows.push(pending);
  if (state.reserved_bytes === null) return rows;
  if (state.free_bytes === null) {
    const rest = state.reserved_bytes - state.active_bytes;
    rows.push({ key: "free", label: "not allocated", bytes: rest, title: "Free, or lost to rounding" });
    return rows;
  }
  const rounded = state.pools.reduce((sum, pool) => sum + pool.rounded_bytes, 0);
  const rounding = rounded - state.active_bytes;
  rows.push({ key: "rounding", label: "rounding", bytes: rounding, title: "Set aside beyond what was requested" });
  rows.push({ key: "free", label: "free", bytes: state.free_bytes, title: "Reserved, but in no block" });
  const rest = state.reserved_bytes - rows.reduce((sum, row) => sum + row.bytes, 0);
  if (rest !== 0)
    rows.push({ key: "rest", label: rest < 0 ? "in no segment" : "not placed", bytes: rest, title: DIFFERS });
  return rows;
}

const DIFFERS = "The file's numbers disagree by this much: without it, the rows do not sum to the reserved memory";

function What({ state }: { state: AllocatorState }) {
  const { what } = state;
  if (!what || KINDS[what.kind] === undefined) return null;
  return (
    <p class="where">
      with this event <span title={exactBytes(what.bytes)}>{asPartOf(state.reserved_bytes ?? state.active_bytes, what.bytes)}</span> {KINDS[what.kind]}
      {what.line ? (
        <>
          {" in "}
          <span class="mono chip breaking" title={titleText(what.line)}>
            {shortLine(what.line)}
          </span>
        </>
      ) : (
        " (where: not recorded)"
      )}
    </p>
  );
}

/** The file's name without its folders: the whole stands in the title. */
export function shortLine(line: string): string {
  const place = /^(.*[/\\])([^/\\]*:-?\d+ \(.*\))$/s.exec(line);
  return cellText(place ? place[2]! : line);
}

function Waste({ state, of }: { state: AllocatorState; of: number }) {
  if (state.unused === null) return null;
  return (
    <dl class="waste">
      <dt title="(reserved − allocated) / reserved">Unused reserved memory</dt>
      <dd data-testid="unused">{percent(state.unused, 1)}</dd>
      {state.largest_free_bytes !== null && (
        <Fact of="Largest free block" class="amount" title={exactBytes(state.largest_free_bytes)} data-testid="largest-free">
          {asPartOf(of, state.largest_free_bytes)}
        </Fact>
      )}
      {state.split !== null && (
        <>
          <dt title="1 − largest free block / all free memory: 0 if in one piece">Free, but in pieces</dt>
          <dd data-testid="split">{percent(state.split, 1)}</dd>
        </>
      )}
    </dl>
  );
}
