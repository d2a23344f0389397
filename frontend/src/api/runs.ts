/** The answer of `runs`, whose steps come in columns: a page reads twenty thousand of them at each reload. */
import type { PackedRuns, PackedSteps, PackedWorker, RunsAnswer, StepEntry, StepPeaks, WorkerEntry } from "./types";

export function unpackedRuns(answer: PackedRuns): RunsAnswer {
  const workers = (packed: PackedWorker[]): WorkerEntry[] =>
    packed.map((worker) => ({ ...worker, steps: unpackedSteps(worker.steps) }));
  return { ...answer, runs: answer.runs.map((run) => ({ ...run, workers: workers(run.workers) })) };
}

function unpackedSteps({ step, window, devices }: PackedSteps): StepEntry[] {
  const entries = step.map((number, i): StepEntry => ({ step: number, window: window[i]!, devices: {} }));
  for (const [device, columns] of Object.entries(devices)) {
    const { at, ...peaks } = columns;
    const names = Object.keys(peaks) as (keyof StepPeaks)[];
    at.forEach((place, row) => {
      const stats = Object.fromEntries(names.map((name) => [name, peaks[name][row]]));
      Object.defineProperty(entries[place]!.devices, device, { value: stats, enumerable: true }); // also "__proto__"
    });
  }
  return entries;
}
