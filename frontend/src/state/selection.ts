/** What the route's picks mean in the runs that are there. */
import type { MonitoredWhole, RunEntry, RunsAnswer, StepPeaks, WorkerEntry } from "../api/types";
import { patched, type Route, type RoutePatch } from "./route";

export interface StepChoice {
  step: number;
  /** Which of the worker's windows it was recorded in. */
  window: number;
  stats: StepPeaks;
}

export interface Pick {
  run: string;
  worker: string;
  device: string;
  step: number;
}

/** What a step is compared with. */
export interface Base extends Pick {
  stats: StepPeaks;
}

export interface Selection extends Pick {
  /** Of the recorded step; null where a monitor alone saw it. */
  stats: StepPeaks | null;
  /** What a monitor saw of all steps on this device. */
  monitored: MonitoredWhole | null;
  /** What a monitor saw of the worker's process, whatever the device. */
  process: MonitoredWhole | null;
  runs: string[];
  workers: string[];
  devices: string[];
  steps: StepChoice[];
  /** Whether the step did not end: a request failed in it, and this was written then. */
  failed: boolean;
  /** What the URL asked for and is not there, in words. */
  missing: string[];
  /** Whether the run that the URL asked for is there, but holds no memory of any device. */
  holdsNothing: boolean;
  /** What was recorded in one go with the picked step. */
  window: RecordedWindow;
}

/** rank2 before rank10. */
export const inOrder = new Intl.Collator("en", { numeric: true }).compare;

/** The picked run, worker, device and step, each replaced by a sensible one where the URL names none or an absent one. */
export function resolveSelection(answer: RunsAnswer, route: Route): Selection | null {
  const withSteps = answer.runs.filter((run) => run.workers.some(hasSteps));
  const run = withSteps.find((r) => r.run === route.run) ?? latest(withSteps);
  if (!run) return null;
  const workers = run.workers.filter(hasSteps);
  const worker = workers.find((w) => w.worker === route.worker) ?? highestWorker(workers);
  const recorded = devicesOf(worker);
  const devices = [...new Set([...recorded, ...Object.keys(worker.monitored ?? {})])];
  const device = devices.find((d) => d === route.device) ?? busiest(worker, recorded) ?? highestMonitored(worker);
  if (device === undefined) return null;
  const steps = stepsOf(worker, device);
  const monitored = monitoredOn(worker, device);
  const choice = steps.find((s) => String(s.step) === route.step) ?? watched(monitored, route, steps) ?? highest(steps);
  if (!choice) return null;
  return {
    run: run.run,
    worker: worker.worker,
    device,
    step: choice.step,
    stats: choice.stats,
    monitored,
    process: monitoredOn(worker, "process"),
    runs: withSteps.map((r) => r.run).sort(inOrder),
    workers: workers.map((w) => w.worker).sort(inOrder),
    devices: [...devices].sort(inOrder),
    steps,
    failed: Boolean(worker.dump_of) && choice.step === steps.at(-1)?.step,
    missing: missing(route, { run: run.run, worker: worker.worker, device, step: choice.step }),
    holdsNothing: route.run !== run.run && answer.runs.some((r) => r.run === route.run && r.workers.length > 0),
    window: windowOf(worker, choice.window),
  };
}

/** Another run, on its worst rank, or another rank. Of a run, a device and a step that were not picked by hand are chosen anew. */
export function pickAnother(answer: RunsAnswer, now: Route, patch: { run: string } | { worker: string }): Selection | null {
  const resolved = (change: RoutePatch): Selection | null => resolveSelection(answer, patched(now, change));
  if ("worker" in patch) return resolved(patch);
  const device = now.device === resolved({ device: undefined, step: undefined })?.device ? undefined : now.device;
  const step = now.step === String(resolved({ step: undefined })?.step) ? undefined : now.step;
  return resolved({ ...patch, worker: undefined, device, step });
}

export interface RecordedWindow {
  /** From its first step's start to its last one's end. */
  from: number;
  to: number;
  steps: { step: number; start: number; end: number }[];
}

function windowOf(worker: WorkerEntry, window: number): RecordedWindow {
  const steps = worker.steps
    .filter((s) => s.window === window)
    .flatMap((s) => {
      const stats = Object.values(s.devices)[0];
      return stats ? [{ step: s.step, start: stats.step_start_ns, end: stats.step_end_ns }] : [];
    })
    .sort((a, b) => a.start - b.start);
  const from = steps.reduce((low, s) => Math.min(low, s.start), steps[0]?.start ?? 0);
  return { from, to: steps.reduce((high, s) => Math.max(high, s.end), from), steps };
}

/**
 * What to compare with: the URL's choice, else the step before, for the first step the one after it, else the nearest recording of the same model on the
 * same kind of device; null where there is none, as any other comparison would be of our own invention.
 */
export function resolveBase(answer: RunsAnswer, route: Route, picked: Selection): Base | null {
  const run = find(answer.runs, route.base_run ?? picked.run) ?? find(answer.runs, picked.run);
  const wanted = route.base_worker ?? picked.worker;
  const worker = run?.workers.find((w) => w.worker === wanted) ?? run?.workers[0];
  if (!run || !worker) return null;
  const chosen = within(run, worker, route, picked);
  if (chosen || BASE_PICKS.some((key) => route[key] !== undefined)) return chosen;
  const next = runBefore(answer, picked); // the run that the page offers to compare with, by the same rule
  const others = [...answer.runs]
    .sort((a, b) => Number(b.run === next) - Number(a.run === next) || apart(a.run, picked.run) - apart(b.run, picked.run))
    .flatMap((r) => r.workers.filter(hasSteps).map((w) => ({ r, w })));
  const other = others.find(({ r, w }) => !(r === run && w === worker) && isAlike(answer, picked, r, w));
  return other ? within(other.r, other.w, route, picked) : null;
}

const BASE_PICKS = ["base_run", "base_worker", "base_device", "base_step"] as const;

/** Compares with what the page finds. */
export const FOUND_BASE = { base_run: undefined, base_worker: undefined, base_device: undefined, base_step: undefined } as const;

/** Of another run: what the run before it was compared with stays, unless that is known to be of another model or kind of device. */
export function keptBase(answer: RunsAnswer, now: Route, next: Pick): RoutePatch {
  const own = answer.runs.find((r) => r.run === next.run)?.workers.find((w) => w.worker === next.worker);
  const base = answer.runs.find((r) => r.run === now.base_run);
  const fits = ({ model, ...w }: WorkerEntry): boolean =>
    (!model || !own?.model || model === own.model) && devicesOf(w).some((device) => kindOf(device) === kindOf(next.device));
  return base === undefined || base.workers.some(fits) ? {} : FOUND_BASE;
}

/** What the URL asks to compare with and is not there, in words. */
export function missingBase(route: Route, base: Pick | null): string[] {
  return BASE_PICKS.flatMap((key) => {
    const [asked, name] = [route[key], key.slice("base_".length) as keyof Pick];
    return asked === undefined || (base && asked === String(base[name])) ? [] : [`${name} ${asked} to compare with`];
  });
}

/** "cuda" of "cuda:0". */
function kindOf(device: string): string {
  return device.split(":")[0]!;
}

/** Whether a worker recorded the picked one's model, or another rank of its run, on the same kind of device. */
function isAlike(answer: RunsAnswer, picked: Pick, run: RunEntry, worker: WorkerEntry): boolean {
  const own = answer.runs.find((r) => r.run === picked.run)?.workers.find((w) => w.worker === picked.worker);
  const sameModel = run.run === picked.run || (worker.model !== undefined && worker.model !== "" && worker.model === own?.model);
  return sameModel && devicesOf(worker).some((device) => kindOf(device) === kindOf(picked.device));
}

/** 0 for a run of the same folder, 1 for another's. */
function apart(run: string, other: string): number {
  const folder = (name: string): string => name.slice(0, name.lastIndexOf("/") + 1);
  return run === other || folder(run) === folder(other) ? 0 : 1;
}

/** Of the runs of the same model and kind of device, the one before by name, as yesterday's is: of its folder, if that has any. */
export function runBefore(answer: RunsAnswer, picked: Pick): string | null {
  const { run } = picked;
  const others = answer.runs.filter((r) => r.run !== run && r.workers.some((w) => isAlike(answer, picked, r, w)));
  const near = others.filter((r) => apart(r.run, run) === 0);
  const names = (near.length > 0 ? near : others).map((r) => r.run).sort(inOrder);
  return names.findLast((name) => inOrder(name, run) < 0) ?? names[0] ?? null;
}

function within(run: RunEntry, worker: WorkerEntry, route: Route, picked: Selection): Base | null {
  const devices = devicesOf(worker);
  const named = (name: string | undefined) => devices.find((d) => d === name);
  const alikeDevices = devices.filter((d) => kindOf(d) === kindOf(picked.device));
  const device = named(route.base_device) ?? named(picked.device) ?? busiest(worker, alikeDevices) ?? busiest(worker, devices);
  if (device === undefined) return null;
  const steps = stepsOf(worker, device);
  const asked = steps.find((s) => String(s.step) === route.base_step);
  const same = run.run === picked.run && worker.worker === picked.worker && device === picked.device;
  const choice = asked ?? (same ? before(steps, picked.step) : alike(steps, picked.step));
  return choice ? { run: run.run, worker: worker.worker, device, step: choice.step, stats: choice.stats } : null;
}

/** A device's steps; of several windows with one step number the last counts, as for the server. */
export function stepsOf(worker: WorkerEntry, device: string): StepChoice[] {
  return worker.steps
    .flatMap((s) => {
      const stats = Object.hasOwn(s.devices, device) ? s.devices[device] : undefined;
      return stats ? [{ step: s.step, window: s.window, stats }] : [];
    })
    .sort((a, b) => a.step - b.step)
    .filter((s, i, all) => all[i + 1]?.step !== s.step);
}

/** Of the steps with the highest peak, the first. */
export function highest(steps: StepChoice[]): StepChoice | undefined {
  let best = steps[0];
  for (const s of steps) if (best && s.stats.peak_bytes > best.stats.peak_bytes) best = s;
  return best;
}

function devicesOf(worker: WorkerEntry): string[] {
  return worker.devices.filter((d) => worker.steps.some((s) => Object.hasOwn(s.devices, d)));
}

function busiest(worker: WorkerEntry, devices: string[]): string | undefined {
  const top = (d: string) => Math.max(...stepsOf(worker, d).map((s) => s.stats.peak_bytes));
  return [...devices].sort((a, b) => orderOf(a) - orderOf(b) || top(b) - top(a))[0];
}

/** What was recorded last: the run that whoever opens the tab has just made. */
function latest(runs: RunEntry[]): RunEntry | undefined {
  return [...runs].sort((a, b) => (b.end_ns ?? 0) - (a.end_ns ?? 0))[0];
}

/** What was dumped when memory ran out, else the worker that peaks highest, as Fleet and Ranks have it: on an accelerator, where any has one. */
function highestWorker(workers: WorkerEntry[]): WorkerEntry {
  const dumps = workers.filter(({ dump_of }) => dump_of);
  const tops = (dumps.length > 0 ? dumps : workers).map((worker) => ({ worker, ...highestDevice(worker) }));
  return tops.reduce((top, one) => (one.order < top.order || (one.order === top.order && one.bytes > top.bytes) ? one : top)).worker;
}

/** Accelerators come before the host's memory, and that before the process. */
function orderOf(device: string): number {
  return device === "process" ? 2 : device === "cpu" || device === "shared" ? 1 : 0;
}

/** The peak on the device that a worker opens on. */
function highestDevice(worker: WorkerEntry): { order: number; bytes: number } {
  const tops = new Map<string, number>();
  const seen = (device: string, bytes: number): void => void tops.set(device, Math.max(bytes, tops.get(device) ?? 0));
  for (const { devices } of worker.steps) for (const [device, stats] of Object.entries(devices)) seen(device, stats.peak_bytes);
  for (const [device, whole] of Object.entries(worker.monitored ?? {})) seen(device, whole.highest_bytes);
  const order = Math.min(...[...tops.keys()].map(orderOf));
  return { order, bytes: Math.max(...[...tops].flatMap(([device, bytes]) => (orderOf(device) === order ? [bytes] : []))) };
}

function hasSteps(worker: WorkerEntry): boolean {
  return devicesOf(worker).length > 0 || Object.keys(worker.monitored ?? {}).length > 0;
}

function monitoredOn(worker: WorkerEntry, device: string): MonitoredWhole | null {
  const monitored = worker.monitored ?? {};
  return Object.hasOwn(monitored, device) ? monitored[device]! : null;
}

function highestMonitored(worker: WorkerEntry): string | undefined {
  const found = Object.entries(worker.monitored ?? {});
  return found.sort(([, a], [, b]) => b.highest_bytes - a.highest_bytes)[0]?.[0];
}

/** The step that the URL names, if a monitor saw it; without a word the highest, where none is recorded. */
function watched(
  whole: MonitoredWhole | null,
  route: Route,
  recorded: StepChoice[],
): { step: number; window: -1; stats: null } | undefined {
  if (!whole) return undefined;
  const asked = /^\d{1,15}$/.test(route.step ?? "") ? Number(route.step) : NaN;
  if (asked >= whole.first && asked <= whole.last) return { step: asked, window: -1, stats: null };
  return recorded.length === 0 ? { step: whole.highest_step, window: -1, stats: null } : undefined;
}

function before(steps: StepChoice[], step: number): StepChoice | undefined {
  return steps.findLast((s) => s.step < step) ?? steps.find((s) => s.step > step);
}

function alike(steps: StepChoice[], step: number): StepChoice | undefined {
  return steps.find((s) => s.step === step) ?? highest(steps);
}

function find(runs: RunEntry[], name: string): RunEntry | undefined {
  return runs.find((r) => r.run === name && r.workers.length > 0);
}

function missing(route: Route, got: Pick): string[] {
  const keys = ["run", "worker", "device", "step"] as const;
  return keys.flatMap((key) => {
    const asked = route[key];
    return asked !== undefined && asked !== String(got[key]) ? [`${key} ${asked}`] : [];
  });
}
