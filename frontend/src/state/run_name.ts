/** What a run goes by: TensorBoard calls the one at the top of its log directory ".". */
import { signal } from "@preact/signals";

/** As TensorBoard was given it; "" where it was given several. */
export const logdir = signal("");

export function runName(run: string): string {
  if (run !== ".") return run;
  const folder = logdir.value.split(/[\\/]/).findLast((part) => part !== "" && part !== ".");
  return folder === undefined || folder === ".." ? "(top folder)" : folder;
}
