/** The answer of `ranks` in docs/http_api.md. */

export type Measure = "allocated" | "reserved";

export interface RanksAnswer {
  /** What the bytes are, and what they could be here. */
  of: Measure;
  offered: Measure[];
  /** Steps in all columns, and each column's steps, inclusive. */
  count: number;
  first: number[];
  last: number[];
  rows: Rank[];
}

/** One device of one worker. */
export interface Rank {
  worker: string;
  device: string;
  capacity_bytes: number | null;
  count: number;
  highest_bytes: number;
  highest_step: number;
  /** The highest may have been higher. */
  at_least: boolean;
  /** Whether the step of the highest was recorded in full. */
  recorded: boolean;
  lowest_bytes: number;
  lowest_step: number;
  /** The rank in the middle of all that have the step of the highest; null where no other has it. */
  median: { worker: string; device: string; bytes: number; recorded: boolean } | null;
  /** Its highest in each column; null where it has no step there. */
  bytes: (number | null)[];
  /** And the step that has it; null where every column is one step. */
  steps: (number | null)[] | null;
}
