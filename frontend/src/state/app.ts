/** The state of the whole tab: the route, the runs, and what both together pick. */
import { computed, effect, signal } from "@preact/signals";
import { askAgain, forgetAnswers } from "../api/remote";
import { type Failure, failureOf, reachable, request } from "../api/request";
import { unpackedRuns } from "../api/runs";
import type { PackedRuns, RunsAnswer } from "../api/types";
import { onAddressEdited, readAddress, writeAddress } from "../host/address";
import { onDataChanged, onShown, whileShown } from "../host/refresh";
import { comeBack, leave } from "../host/scroll";
import { asPartOf } from "./bytes";
import { patched, type Route, type RoutePatch } from "./route";
import { logdir } from "./run_name";
import { keptBase, missingBase, type Pick, pickAnother, resolveBase, resolveSelection } from "./selection";
import { type Stretch, stretchOf } from "./stretch";

export const route = signal<Route>({ view: "overview" });
export const runs = signal<RunsAnswer | undefined>(undefined);
export const runsFailure = signal<Failure | undefined>(undefined);

export const selection = computed(() => (runs.value ? resolveSelection(runs.value, route.value) : null));
export const base = computed(() =>
  runs.value && selection.value ? resolveBase(runs.value, route.value, selection.value) : null,
);

/** What the address asks for and is not here. */
export const missing = computed(() => [
  ...(selection.value?.missing ?? []),
  ...(selection.value?.stats ? missingBase(route.value, base.value) : []),
]);

/** Whether the picked step is the only one, and is step 0: as where nothing marked any steps. */
export const alone = computed(() => selection.value?.steps.length === 1 && selection.value.step === 0);

/** The same of any step, in words for both sides of a comparison. */
export function isAlone(side: Pick): boolean {
  const worker = runs.value?.runs.find((r) => r.run === side.run)?.workers.find((w) => w.worker === side.worker);
  return side.step === 0 && worker?.steps.length === 1 && worker.steps[0]!.step === 0;
}

/** The selection as the query of a route of the API. */
export const picked = computed(() => {
  const s = selection.value;
  return s && { run: s.run, worker: s.worker, step: s.step, device: s.device };
});

/** What views of time show: the picked step, or where the address says so its whole window. */
export const stretch = computed<Stretch | null>(() =>
  selection.value ? stretchOf(selection.value, route.value, alone.value) : null,
);

/** Changes the route. What the page picked by itself is spelled out, so that the address means the same tomorrow. */
export function navigate(patch: RoutePatch): void {
  const left = spelledOut(route.value);
  route.value = patched(left, patch);
  const moved = PLACES.some((key) => left[key] !== route.value[key]);
  if (moved) leave(placeOf(left));
  writeSoon(moved ? left : undefined);
}

/** Another view or pick is a place of its own in the browser's history; a zoom or a search is not. */
const PLACES = ["view", "run", "worker", "device", "step", "span", "base_run", "base_worker", "base_device", "base_step"] as const;

/** A place by one name, whether its address spells out everything or not. */
function placeOf(of: Route): string {
  const whole = spelledOut(of, runs.value ? resolveSelection(runs.value, of) : null);
  return JSON.stringify(PLACES.map((key) => whole[key] ?? null));
}

function spelledOut(now: Route, s = selection.value): Route {
  return s ? { ...now, run: s.run, worker: s.worker, device: s.device, step: String(s.step) } : now;
}

/** Another run opens on its worst rank. Nothing is said where it lacks the step or the device. */
export function pick(patch: { run: string } | { worker: string }): void {
  const found = runs.value && pickAnother(runs.value, spelledOut(route.value), patch);
  if (!runs.value || !found) return navigate(patch);
  const { run, worker, device, step } = found;
  navigate({ run, worker, device, step: String(step), ...keptBase(runs.value, route.value, found) });
}

let writing: ReturnType<typeof setTimeout> | undefined;

/** Dragging changes the route many times a second; browsers refuse that many address changes. */
function writeSoon(left?: Route): void {
  if (left) {
    if (writing !== undefined) writeAddress(left); // Back returns to the place as it was left
    forgetWriting();
    writeAddress(route.value, true);
    return;
  }
  clearTimeout(writing);
  writing = setTimeout(() => ((writing = undefined), writeAddress(route.value)), 120);
}

function forgetWriting(): void {
  clearTimeout(writing);
  writing = undefined;
}

let lastText = "";

let asking: AbortController | undefined;

/** Asks for the runs; what is asked already is waited for if `patient`, else given up. */
export async function loadRuns(patient = false): Promise<void> {
  if (asking && patient) return;
  asking?.abort();
  const mine = (asking = new AbortController());
  try {
    const answer = await request<PackedRuns>("runs", mine.signal);
    const text = JSON.stringify(answer);
    runsFailure.value = undefined;
    if (text === lastText) return;
    if (lastText !== "") forgetAnswers();
    lastText = text;
    logdir.value = answer.logdir;
    runs.value = unpackedRuns(answer);
  } catch (error) {
    if (!mine.signal.aborted) runsFailure.value = failureOf(error, "runs");
  } finally {
    if (asking === mine) asking = undefined;
  }
}

/** Asks anew for all that the server could not answer. */
export function tryAgain(): void {
  askAgain();
  void loadRuns();
}

/** Milliseconds between looks for what is not here; TensorBoard itself looks every 5 s. */
const LOOK_EVERY = 5_000;

/** Whether TensorBoard, all runs or what the address asks for is not here. */
const lacking = computed(() => !reachable.value || selection.value === null || missing.value.length > 0);

/** Called once by render(). */
export function start(): void {
  route.value = readAddress();
  onAddressEdited((edited) => {
    forgetWriting(); // what was about to be written is of the place that was left
    leave(placeOf(route.value));
    comeBack(placeOf(edited));
    route.value = edited;
  });
  onShown(() => route.value.run !== undefined && writeSoon());
  onDataChanged(() => void loadRuns());
  effect(() => (lacking.value ? whileShown(() => void loadRuns(true), LOOK_EVERY) : undefined));
  void loadRuns();
}

/** A size in the unit of the peak that is on show, as in the sentences and tables around it. */
export function asPartOfPeak(bytes: number): string {
  return asPartOf(stretch.value!.peak.bytes, bytes);
}
