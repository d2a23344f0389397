import { Swatch } from "../views/category";
import { exactBytes, type Unit, unitFor, withUnit } from "../state/bytes";
import { grouped } from "../state/numbers";
import { duration } from "../state/time";
import { BytesCell, Delta } from "../views/amount";
import { EventButtons } from "../views/event_buttons";
import type { State } from "./levels";
import { PartName } from "./part_name";
import type { AxisName, Device } from "./recording";
import { Heads } from "../views/table";

interface Props {
  device: Device;
  by: string;
  label: string;
  state: State;
  peak: State;
  axis: AxisName;
  origin: number;
  onStep: (by: 1 | -1) => void;
  onPeak: () => void;
}

/** The state at the cursor, to the byte. */
export function Moment({ device, by, label, state, peak, axis, origin, onStep, onPeak }: Props) {
  const atPeak = state.event === peak.event;
  const unit = unitFor(device.peak.bytes);
  return (
    <aside class="card side" data-testid="moment-panel" data-event={state.event} aria-live="off">
      <h2>
        {atPeak ? "At the peak" : "At this moment"}
        {axis === "time" && state.event >= 0 && `, ${duration(state.place - origin)}`}
        <br />
        <span class="approx">{state.event < 0 ? "before the first event" : `event ${grouped(state.event)}`}</span>
      </h2>
      <div class="big amount" title={exactBytes(state.bytes)} data-testid="moment-bytes">
        {withUnit(state.bytes, unit)}
      </div>
      <p class="where">
        {grouped(state.bytes)} bytes
        {state.reserved !== null && (
          <>
            <br />
            <span title={exactBytes(state.reserved)} data-testid="moment-reserved">
              reserved {withUnit(state.reserved)}
            </span>
          </>
        )}
        {device.capacity !== null && (
          <>
            <br />
            of {withUnit(device.capacity)} on the device
          </>
        )}
      </p>
      <Parts by={by} label={label} state={state} peak={peak} unit={unit} atPeak={atPeak} />
      <EventButtons
        before={state.count > 0}
        after={state.count < device.event.length}
        onStep={onStep}
        onPeak={!atPeak && onPeak}
      />
    </aside>
  );
}

interface PartsProps {
  by: string;
  label: string;
  state: State;
  peak: State;
  unit: Unit;
  atPeak: boolean;
}

/** One row for each key that is alive, in the order in which the curve stacks them, from the top. */
function Parts({ by, label, state, peak, unit, atPeak }: PartsProps) {
  const rows = state.parts
    .map((part, k) => ({ ...part, k, change: part.bytes - peak.parts[k]!.bytes }))
    .filter((part) => part.bytes > 0 || part.change !== 0)
    .reverse();
  return (
    <table class="plain">
      <Heads columns={[label, { number: unit.name }, !atPeak && { number: "vs peak" }]} />
      <tbody>
        {rows.map((part) => (
          <tr key={part.key} data-testid="moment-row" data-key={part.key}>
            <th scope="row">
              <span class="flexed">
                <Swatch by={by} of={part.key} index={part.k} />
                <PartName by={by} name={part.key} />
              </span>
            </th>
            <BytesCell bytes={part.bytes} unit={unit} />
            {!atPeak && (
              <td class="number">
                <Delta bytes={part.change} unit={unit} />
              </td>
            )}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
