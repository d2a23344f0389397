import { useEffect, useMemo, useState } from "preact/hooks";
import type { LanesAnswer, Span } from "../api/types";
import { columnsIn, EVENT_AXIS, TIME_AXIS } from "../draw/axes";
import { dark } from "../host/theme";
import { unitFor, withUnit } from "../state/bytes";
import { titleText, visible } from "../state/names";
import { grouped } from "../state/numbers";
import { FindingAction, FindingHead } from "../views/advice/finding_text";
import { Segmented } from "../views/segmented";
import { Chart } from "../views/timeline/chart";
import { countTo, curveOf, Levels, neighbor, stateAfter, stateAt } from "./levels";
import { Moment } from "./moment";
import { PeakTables } from "./peak_tables";
import { type AxisName, type Device, openDevice, type ReportData, wholeOf } from "./recording";

/** The page: which device, and under it the curve with the state at the cursor. */
export function Report({ data }: { data: ReportData }) {
  const [chosen, setChosen] = useState(() => highest(data));
  const [device, setDevice] = useState<Device>();
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    const raw = data.devices[chosen];
    if (raw) openDevice(raw).then(setDevice, (reason: unknown) => setTrouble(String(reason)));
  }, [chosen]);
  return (
    <>
      <header class="report-head">
        <h1>{titleText(data.title)}</h1>
        {data.devices.length > 1 && (
          <label class="picker">
            <span class="unseen">Device</span>
            <select
              data-testid="picker-device"
              value={chosen}
              onChange={(event) => setChosen(Number(event.currentTarget.value))}
            >
              {data.devices.map((item, row) => (
                <option key={row} value={row}>
                  {visible(item.name)}, peak {withUnit(item.peak.bytes)}
                </option>
              ))}
            </select>
          </label>
        )}
        <span class="muted">{summary(data)}</span>
        <button type="button" class="toggle" data-testid="theme" onClick={flipTheme}>
          {dark.value ? "Light" : "Dark"}
        </button>
      </header>
      <main class="content">
        {data.devices.length === 0 && <p class="nothing">Nothing was allocated in this recording.</p>}
        {trouble && <p class="nothing">This browser cannot unpack the data: {trouble}. Use one from 2023 or later.</p>}
        {device && <DeviceView key={device.name} data={data} device={device} />}
        {data.notes.length > 0 && (
          <ul class="report-notes" data-testid="notes">
            {data.notes.map((note, i) => (
              <li key={i}>{titleText(note)}</li>
            ))}
          </ul>
        )}
      </main>
    </>
  );
}

function DeviceView({ data, device }: { data: ReportData; device: Device }) {
  const [by, setBy] = useState("0");
  const [axis, setAxis] = useState<AxisName>(data.timed ? "time" : "event");
  const [shown, setShown] = useState<[number, number]>();
  const [width, setWidth] = useState(0);
  const [hovered, setHovered] = useState<number>();
  const [pinned, setPinned] = useState<number>();
  const division = device.divisions[Number(by)]!;
  const levels = useMemo(() => new Levels(device, division), [device, division]);
  const whole = useMemo(() => wholeOf(data, device, axis), [device, axis]);
  const window = shown ?? whole;
  const px = columnsIn(width);
  const curve = useMemo(
    () => (width > 0 ? curveOf(levels, axis, ...window, px) : undefined),
    [levels, axis, window[0], window[1], px, width > 0],
  );
  const strip = useMemo(() => (width > 0 ? curveOf(levels, axis, ...whole, px) : undefined), [levels, whole, px, width > 0]);
  const lanes = useMemo(() => (axis === "time" ? device.lanes : lanesByEvent(data, device)), [axis, device]);
  const failed = useMemo(
    () => device.failed.map(([event, time, bytes]) => ({ place: axis === "time" ? time : event + 0.5, bytes })),
    [axis, device],
  );
  const peak = useMemo(() => stateAfter(levels, axis, countTo(device.event, device.peak.event)), [levels, axis]);
  const state =
    hovered !== undefined ? stateAt(levels, axis, hovered) : pinned !== undefined ? stateAfter(levels, axis, pinned) : peak;
  const pin = (place: number | undefined): void =>
    setPinned(place === undefined ? undefined : countTo(device[axis], place));
  const step = (by: 1 | -1): void => {
    setHovered(undefined);
    setPinned(neighbor(device, state.count, by));
  };
  const zoom = ([t0, t1]: [number, number]): void =>
    setShown(t0 <= whole[0] && t1 >= whole[1] ? undefined : [t0, Math.max(t1, t0 + 1)]);
  const words = axis === "time" ? TIME_AXIS : EVENT_AXIS;
  const flip = (name: AxisName): void => {
    setShown(undefined);
    setAxis(name);
  };
  const zoomed = shown !== undefined;
  return (
    <>
      <div class="tools">
        {device.divisions.length > 1 && (
          <Segmented
            label="Color by"
            testid="by"
            options={device.divisions.map((item, row) => [String(row), item.label] as const)}
            value={by}
            onPick={setBy}
          />
        )}
        {data.timed && (
          <Segmented
            label="Axis"
            testid="axis"
            options={[
              ["time", "Time"],
              ["event", "Events"],
            ]}
            value={axis}
            onPick={flip}
          />
        )}
        {zoomed && (
          <button type="button" class="toggle" data-testid="reset-zoom" onClick={() => zoom(whole)}>
            Everything
          </button>
        )}
        {zoomed && (
          <span class="muted">
            showing {words.words(window[1] - window[0])} of {words.words(whole[1] - whole[0])}
          </span>
        )}
        <span class="hint">drag to zoom · wheel to zoom · double-click or Esc to reset · ← → step through events</span>
      </div>
      <div class="beside">
        <section class="card chart-card">
          <Chart
            by={division.by}
            stripBy={division.by}
            curve={curve}
            strip={strip}
            lanes={lanes ?? undefined}
            window={window}
            whole={whole}
            cursor={{ place: hovered ?? state.place, atPeak: state.event === peak.event, hover: setHovered, pin, step }}
            peakBytes={device.peak.bytes}
            peakPlace={peak.place}
            failed={failed}
            canZoom
            axis={words}
            onWidth={setWidth}
            onZoom={zoom}
          />
          {axis === "time" && lanes !== null && lanes.omitted > 0 && (
            <p class="foot">{grouped(lanes.omitted)} short {lanes.label ?? "module calls"} are left out of the lanes.</p>
          )}
        </section>
        <Moment
          device={device}
          by={division.by}
          label={division.label.toLowerCase()}
          state={state}
          peak={peak}
          axis={axis}
          origin={whole[0]}
          onStep={step}
          onPeak={() => setPinned(undefined)}
        />
      </div>
      <Findings device={device} />
      <PeakTables device={device} division={division} timed={data.timed} />
    </>
  );
}

/** The device to begin with: the one with the highest peak. */
function highest(data: ReportData): number {
  const peaks = data.devices.map((device) => device.peak.bytes);
  return Math.max(0, peaks.indexOf(Math.max(...peaks)));
}

function summary(data: ReportData): string {
  const [device] = data.devices;
  const name = data.devices.length === 1 ? `${visible(device!.name)}, peak ${withUnit(device!.peak.bytes, unitFor(device!.peak.bytes))}, ` : "";
  return `${name}${grouped(data.events - data.first_event)} events, from ${visible(data.source)}`;
}

function flipTheme(): void {
  dark.value = !dark.value;
  document.documentElement.classList.toggle("dark", dark.value);
}

/** The lanes where every event is as wide as the others; what lies between two events has no width. */
function lanesByEvent(data: ReportData, device: Device): LanesAnswer | null {
  const { lanes } = device;
  if (!lanes) return null;
  const place = (time: number): number => {
    const before = countTo(device.time, time, true);
    return before < device.event.length ? device.event[before]! : data.events;
  };
  const moved = (spans: Span[]): Span[] =>
    spans
      .map((span) => ({ ...span, start_ns: place(span.start_ns), end_ns: place(span.end_ns) }))
      .filter((span) => span.end_ns > span.start_ns);
  return { ...lanes, steps: moved(lanes.steps), phases: moved(lanes.phases), modules: lanes.modules.map(moved) };
}

/** What Advice says of the device. The page has no other views, so what is said leads nowhere. */
export function Findings({ device }: { device: Device }) {
  const { heading, findings } = device.advice;
  return (
    <section data-testid="advice" aria-label="Advice">
      <h2 class="report-advice">Advice: {heading}</h2>
      {findings.map((finding) => (
        <section key={finding.kind} class={`card finding ${finding.level}`} data-testid="finding" data-key={finding.kind}>
          <FindingHead finding={finding} />
          <FindingAction finding={finding} />
        </section>
      ))}
    </section>
  );
}
