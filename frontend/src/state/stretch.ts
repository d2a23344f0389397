/** What a view of time shows: the picked step, or all steps of the window it was recorded in as one. */
import type { Pick, Selection } from "./selection";
import type { View } from "./route";
import { stepName } from "./sentences";

export interface Stretch {
  /** As the API's routes are asked for it. */
  query: Pick & { span?: "window" };
  from: number;
  to: number;
  peak: { bytes: number; time: number };
  /** "step 5", "steps 5 to 6", "the recording". */
  name: string;
  /** Whether it is the whole window; then `step` in `query` is only one of its steps. */
  whole: boolean;
}

/** Views that can show a window's steps as one; the others keep to the step. */
const WITH_WINDOWS: readonly View[] = ["timeline", "allocations", "stacks", "allocator"];

export function showsWindows(view: View): boolean {
  return WITH_WINDOWS.includes(view);
}

/** Null where a monitor alone saw the step. */
export function stretchOf(picked: Selection, { view, span }: { view: View; span?: string }, alone: boolean): Stretch | null {
  const { run, worker, device, step, stats, steps, window } = picked;
  if (!stats) return null;
  const query = { run, worker, step, device };
  const peakOf = (one: typeof stats): Stretch["peak"] => ({ bytes: one.peak_bytes, time: one.peak_time_ns });
  if (span !== "window" || window.steps.length < 2 || !showsWindows(view))
    return { query, from: stats.step_start_ns, to: stats.step_end_ns, peak: peakOf(stats), name: stepName(step, alone), whole: false };
  const mine = steps.find((one) => one.step === step)?.window;
  const peaks = steps.filter((one) => one.window === mine).map((one) => peakOf(one.stats));
  return {
    query: { ...query, span: "window" },
    from: window.from,
    to: window.to,
    peak: peaks.reduce((top, one) => (one.bytes > top.bytes ? one : top), peaks[0] ?? peakOf(stats)),
    name: `steps ${window.steps[0]!.step} to ${window.steps.at(-1)!.step}`,
    whole: true,
  };
}
