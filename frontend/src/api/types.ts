/** The answers of docs/http_api.md. Bytes are integers; times are nanoseconds since the window's start. */

export type Categories = Record<string, number>;

/** What `runs` tells of each step. */
export interface StepPeaks {
  peak_bytes: number;
  peak_time_ns: number;
  peak_reserved_bytes: number | null;
  step_start_ns: number;
  step_end_ns: number;
  capacity_bytes: number | null;
}

export interface StepStats extends StepPeaks {
  start_bytes: number;
  end_bytes: number;
  window_peak_bytes: number;
  allocated_bytes: number;
  allocations: number;
  stayed_bytes: number;
  stayed: number;
}

export interface MonitoredWhole {
  /** "allocator": torch's own counters; "process": resident memory as the system counts it. */
  kind: "allocator" | "process";
  capacity_bytes: number | null;
  count: number;
  first: number;
  last: number;
  highest_step: number;
  highest_bytes: number;
  retries: number | null;
  ooms: number | null;
  duration_ns: number;
}

export interface StepEntry {
  step: number;
  window: number;
  devices: Record<string, StepPeaks>;
}

export interface WorkerEntry {
  worker: string;
  devices: string[];
  steps: StepEntry[];
  /** By device: what a monitor saw of all steps. */
  monitored?: Record<string, MonitoredWhole>;
}

export interface RunEntry {
  run: string;
  workers: WorkerEntry[];
}

export interface Problem {
  file: string;
  reason: string;
  fix: string;
}

export interface RunsAnswer {
  runs: RunEntry[];
  problems: Problem[];
  logdir: string;
}

export interface Part {
  key: string;
  bytes: number;
  count: number;
  categories?: Categories;
}

export interface Allocation {
  bytes: number;
  category: string;
  module: string | null;
  operator: string | null;
  phase: string | null;
  name: string | null;
  born_ns: number | null;
  freed_ns: number | null;
  address: string;
  /** Why it has its category: a sentence. */
  why: string;
}

export interface Note {
  level: "info" | "warning";
  text: string;
}

export interface Account {
  level: "exact" | "different" | "not_known" | "not_recorded" | "simulated";
  text: string;
  moments: {
    moment: "start" | "peak" | "end";
    counted_bytes: number;
    counter: string;
    allocator_bytes: number | null;
    at_least: boolean;
    missing_bytes: number | null;
    causes: { cause: string; bytes: number }[];
  }[];
}

export interface StepAnswer {
  run: string;
  worker: string;
  step: number;
  device: string;
  stats: StepStats;
  peak: {
    bytes: number;
    time_ns: number;
    event: number;
    phase: string | null;
    operator: string | null;
    module: string | null;
    by_category: Part[];
    by_module: Part[];
    by_operator: Part[];
    by_phase: Part[];
    largest: Allocation[];
  };
  account: Account;
  notes: Note[];
  previous_step: number | null;
  /** What the first step left that this one can be held against; null for itself. */
  first_end: { step: number; end_bytes: number } | null;
  source: {
    kind: string;
    torch: string | null;
    side_file: string;
    side_file_present: boolean;
    window: number;
    epoch_ns: string;
  };
}

/** Any of `divisions`. */
export type CurveBy = string;
export type Over = "time" | "event";

export interface CurveAnswer {
  /** What t0 and t1 count; without the side file always time. Ours alone: absent in exported pages. */
  over?: Over;
  /** The same stretch on both axes: from the first to behind the last event, and when these were. */
  events?: [number, number];
  times?: [number, number];
  /** Of the whole step or window; -1 where it has no event. */
  first_event?: number;
  last_event?: number;
  t0: number;
  t1: number;
  px: number;
  min: number[];
  max: number[];
  reserved: number[] | null;
  keys: string[];
  /** What the keys go by: a stack by its leading line. */
  labels?: string[];
  /** Of folded modules, for each key: how many it stands for, and whether it can be opened. */
  groups?: { modules: number; opens: boolean }[];
  stacks: number[][];
  peak: { time_ns: number; bytes: number; column: number; event: number };
  exact: boolean;
}

export interface MomentAnswer {
  time_ns: number;
  event: number;
  bytes: number;
  reserved: number | null;
  phase: string | null;
  module: string | null;
  operator: string | null;
  previous_event_ns: number | null;
  next_event_ns: number | null;
  previous_event: number | null;
  next_event: number | null;
  by_category: Part[];
  by_phase: Part[];
  /** By the division that was asked for. */
  parts?: LabeledPart[];
  /** `row`: as in `allocations`. `line`: the source line that asked for it, where stacks were recorded. */
  largest: (Allocation & { row: number; line: string | null })[];
  /** Where it was asked for, and is before this moment; then `largest` has what was allocated since. */
  since?: Since;
}

export interface LabeledPart {
  key: string;
  label: string;
  bytes: number;
  count: number;
}

export interface Span {
  start_ns: number;
  end_ns: number;
  name: string;
  phase: string | null;
}

/** Over events, `start_ns` and `end_ns` are events, as `t0` and `t1`. */
/** What came and went between an earlier event and a moment. */
export interface Since {
  event: number;
  time_ns: number;
  kept_bytes: number;
  kept: number;
  freed_bytes: number;
  freed: number;
}

export interface LanesAnswer {
  over?: Over;
  t0: number;
  t1: number;
  steps: Span[];
  phases: Span[];
  modules: Span[][];
  /** What `modules` holds, where it is something else. */
  label?: string;
  omitted: number;
}

export interface ModuleRow {
  id: number;
  parent: number | null;
  key: string;
  name: string;
  depth: number;
  class_name: string | null;
  kind: "module" | "outside" | "unnamed";
  own: Categories;
  inclusive: Categories;
  own_bytes: number;
  inclusive_bytes: number;
  highest: Categories | null;
  peak_inside_bytes: number | null;
  calls: number;
  allocations: number;
  allocated_bytes: number;
  forward_ns: number;
  backward_ns: number;
}

export interface ModulesAnswer {
  peak_bytes: number;
  rows: ModuleRow[];
}

/** Any of `divisions`. */
export type CompareBy = string;
export type Status = "added" | "removed" | "grown" | "shrunk" | "same";

export interface CompareSide {
  run: string;
  worker: string;
  step: number;
  device: string;
  peak_bytes: number;
  allocations: number;
  /** Ours: the only step of a recording that marked none. */
  alone?: boolean;
}

export interface CompareRow {
  key: string;
  status: Status;
  base_bytes: number;
  other_bytes: number;
  delta_bytes: number;
  base_count: number;
  other_count: number;
  /** What the key goes by. */
  label?: string;
  /** What changed most in it, and by how much. */
  category: string | null;
  category_delta_bytes: number;
}

export interface CompareAnswer {
  base: CompareSide;
  other: CompareSide;
  delta_bytes: number;
  rows: CompareRow[];
}
