/** The answers of docs/http_api.md about steps that a monitor saw. */
import type { MonitoredWhole } from "./types";

/** Columns of (nearly) equally many steps; `high_step`: the first step in a column that has the highest peak. */
export interface StepsAnswer {
  count: number;
  first: number[];
  last: number[];
  low: number[];
  high: number[];
  high_step: number[];
  reserved: (number | null)[] | null;
  /** Steps and how often. */
  retries: [number, number][];
  ooms: [number, number][];
}

export interface FiguresOfStep {
  peak_bytes: number;
  /** The peak may have been higher. */
  at_least: boolean;
  end_bytes: number;
  peak_reserved_bytes: number | null;
  end_reserved_bytes: number | null;
  fragmentation: number | null;
  retries: number | null;
  ooms: number | null;
  allocations: number | null;
  allocated_bytes: number | null;
}

export interface PhaseOfStep {
  name: string;
  count: number;
  duration_ns: number;
  peak_bytes: number;
  at_least: boolean;
  end_bytes: number;
}

export interface StepFiguresAnswer extends FiguresOfStep {
  run: string;
  worker: string;
  device: string;
  kind: "allocator" | "process";
  product: string;
  capacity_bytes: number | null;
  torch: string | null;
  step: number;
  duration_ns: number;
  previous_step: number | null;
  previous: FiguresOfStep | null;
  phases: PhaseOfStep[];
  whole: MonitoredWhole;
  notes: string[];
}
