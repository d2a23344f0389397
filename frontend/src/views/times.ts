/** What the times and modules of a recording are, where they are not those that a program recorded. */
import { MODULES_INFERRED, NO_TIMES, SUMMARY_SHORTENED } from "../api/contract";
import type { Note, StepAnswer } from "../api/types";

/** The source kind of recordings of MemoryEstimator. */
export const ESTIMATOR = "MemoryEstimator";

const ESTIMATED = "An estimate: sizes and order are the model's, times are the estimator's own, not a GPU's.";
const INDEXED = "The snapshot has no times (PyTorch before 2.2): one microsecond stands for one entry.";
const INFERRED = "Modules are inferred from call stacks; what is not sure is not named.";

interface Recorded {
  source: Pick<StepAnswer["source"], "kind">;
  notes: Pick<Note, "code">[];
}

/** One sentence, null where times are times. */
export function aboutTimes(step: Recorded | undefined): string | null {
  if (step?.source.kind === ESTIMATOR) return ESTIMATED;
  return step?.notes.some((note) => note.code === NO_TIMES) ? INDEXED : null;
}

/** One sentence, null where the recording names its modules. */
export function aboutModules(step: Recorded | undefined): string | null {
  return step?.notes.some((note) => note.code === MODULES_INFERRED) ? INFERRED : null;
}

/** Whether a step has its figures alone, because its side file cannot be read here. */
export function hasOnlyFigures(step: Pick<Recorded, "notes"> | undefined): boolean {
  return step?.notes.some((note) => note.code === SUMMARY_SHORTENED) ?? false;
}
