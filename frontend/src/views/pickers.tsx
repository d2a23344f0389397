import { withUnit } from "../state/bytes";
import { addressOf } from "../host/address";
import { alone, missing, navigate, pick, picked, route, selection } from "../state/app";
import { shortened, visible } from "../state/names";
import { runName } from "../state/run_name";
import { FOUND_BASE, type Selection } from "../state/selection";
import { showsWindows } from "../state/stretch";
import { BasePicker } from "./base_picker";
import { CopyButton } from "./copy_button";
import { ExportMenu } from "./export_menu";
import { Picker } from "./picker";
import { MOST_LISTED, nearestStep, TypedStep } from "./typed_step";

/** Run, worker, device, step and what to compare with: always here, in this order; picking keeps the view. */
export function Pickers() {
  const s = selection.value;
  if (!s) return null;
  return (
    <nav class="pickers" aria-label="What is shown">
      <Picker
        label="Run"
        testid="picker-run"
        value={s.run}
        options={s.runs}
        onPick={(run) => pick({ run })}
        name={runName}
      />
      {!namesOnlyItsRun(s) && (
        <Picker
          label="Worker"
          testid="picker-worker"
          value={s.worker}
          options={s.workers}
          onPick={(worker) => pick({ worker })}
        />
      )}
      <Picker
        label="Device"
        testid="picker-device"
        value={s.device}
        options={s.devices}
        onPick={(device) => navigate({ device })}
        name={(d) => deviceName(d, s)}
      />
      <StepPicker s={s} />
      {s.stats && <BasePicker />}
      <div class="actions">
        <Share />
        <ExportMenu />
      </div>
    </nav>
  );
}

/** An imported file's lone worker goes by its run's name: once is enough. */
function namesOnlyItsRun({ run, worker, workers }: Selection): boolean {
  return workers.length === 1 && worker === run.split("/").at(-1);
}

/** The address of all that is picked, zoomed to and marked. */
function Share() {
  return (
    <div class="picker share">
      <CopyButton label="Copy link" testid="copy-link" look="boxed" title="A link to exactly this: picks, zoom, cursor and mark" text={linkToThis} />
    </div>
  );
}

/** The whole address of what is in sight, with what the page picked by itself spelled out. */
function linkToThis(): string {
  const { run, worker, device, step } = picked.value!;
  return `${window.location.origin}${addressOf({ ...route.value, run, worker, device, step: String(step) })}`;
}

function deviceName(device: string, s: Selection): string {
  const capacity = s.stats ? s.stats.capacity_bytes : s.monitored?.capacity_bytes;
  return device === s.device && capacity ? `${device} · ${withUnit(capacity)}` : device;
}

const WINDOW = "window";
/** Another stretch of time: what was zoomed to and pinned within the old one is left behind. */
const ANEW = { t0: undefined, t1: undefined, e0: undefined, e1: undefined, t: undefined, event: undefined, mark: undefined } as const;

function showWindow(): void {
  navigate({ ...ANEW, span: WINDOW, ...(showsWindows(route.value.view) ? {} : { view: "timeline" }) });
}

function StepPicker({ s }: { s: Selection }) {
  const recorded = s.steps.map((choice) => choice.step);
  const at = recorded.indexOf(s.step);
  const [before, after] = s.stats ? [recorded[at - 1], recorded[at + 1]] : neighbors(s);
  return (
    <div class="picker">
      <label for="step-select">Step</label>
      <span class="stepper">
        <button
          type="button"
          aria-label="Previous step"
          data-testid="step-previous"
          disabled={before === undefined}
          onClick={() => go(before)}
        >
          ‹
        </button>
        {s.stats ? <Recorded s={s} /> : <Watched s={s} />}
        <button
          type="button"
          aria-label="Next step"
          data-testid="step-next"
          disabled={after === undefined}
          onClick={() => go(after)}
        >
          ›
        </button>
      </span>
    </div>
  );
}

function go(to: number | undefined): void {
  if (to !== undefined) navigate({ ...(route.value.span === undefined ? {} : ANEW), step: String(to), span: undefined });
}

/** The recorded steps, and where several were recorded in one window, all of them as one. */
function Recorded({ s }: { s: Selection }) {
  const together = s.window.steps.map((one) => one.step);
  const several = together.length > 1;
  const whole = several && route.value.span === WINDOW && showsWindows(route.value.view);
  const name = `${together[0]} to ${together.at(-1)}, the whole window`;
  const steps = s.steps.map((one) => one.step);
  if (steps.length > MOST_LISTED)
    return (
      <>
        <TypedStep
          id="step-select"
          testid="picker-step"
          step={s.step}
          first={steps[0]!}
          last={steps.at(-1)!}
          offered={[]}
          found={(typed) => nearestStep(steps, typed)}
          onPick={go}
        />
        {several && (
          <button
            type="button"
            class="whole-window"
            title={name}
            aria-pressed={whole}
            data-testid="whole-window"
            onClick={() => (whole ? go(s.step) : showWindow())}
          >
            whole window
          </button>
        )}
      </>
    );
  return (
    <select
      id="step-select"
      data-testid="picker-step"
      value={whole ? WINDOW : String(s.step)}
      onChange={(e) => (e.currentTarget.value === WINDOW ? showWindow() : go(Number(e.currentTarget.value)))}
    >
      {several && <option value={WINDOW}>{name}</option>}
      {steps.map((step) => (
        <option key={step} value={String(step)}>
          {alone.value ? "whole window" : step}
        </option>
      ))}
    </select>
  );
}

function Watched({ s: { step, monitored, steps } }: { s: Selection }) {
  const { first = step, last = step } = monitored ?? {};
  const recorded = steps.map((one) => one.step);
  return <TypedStep id="step-select" testid="picker-step" step={step} first={first} last={last} offered={recorded} onPick={go} />;
}

/** Of a step that a monitor alone saw: the numbers below and above. */
function neighbors({ step, monitored }: Selection): [number | undefined, number | undefined] {
  if (!monitored) return [undefined, undefined];
  return [step > monitored.first ? step - 1 : undefined, step < monitored.last ? step + 1 : undefined];
}

/** Says so when the address asked for something that is not here. */
export function MissingPicks() {
  const s = selection.value;
  if (!s || missing.value.length === 0) return null;
  const asked = missing.value.map((m) => shortened(visible(m), 80)).join(", ");
  const why = s.holdsNothing
    ? ", which recorded no memory of any device"
    : `, which ${missing.value.length === 1 ? "is" : "are"} not here`;
  return (
    <p class="missing" role="status" data-testid="missing">
      The address asks for {asked}
      {why}; showing the nearest.{" "}
      <button
        type="button"
        class="quiet"
        onClick={() =>
          navigate({ run: s.run, worker: s.worker, device: s.device, step: String(s.step), ...FOUND_BASE })
        }
      >
        Keep this
      </button>
    </p>
  );
}
