/** The answers of the server (contract.ts), and what the tab makes of them. */
import type * as contract from "./contract";

export type * from "./contract";

export type Categories = Record<string, number>;
export type Over = contract.LanesAnswer["over"];
export type Kind = contract.Listed["kind"];
export type Verdict = contract.Judgement["verdict"];
export type Order = contract.SegmentsAnswer["order"];
export type ColorBy = contract.SegmentsAnswer["by"];
export type Status = contract.CompareRow["status"];

type Absent<T, K extends keyof T> = Omit<T, K> & Partial<Pick<T, K>>;

/** Any of `divisions`. */
export type CurveBy = string;
export type CompareBy = string;

/** What `runs` tells of each step: a row of its columns. */
export type StepPeaks = Pick<contract.StepStats, Exclude<keyof contract.StepColumns, "at">>;

export interface StepEntry {
  step: number;
  window: number;
  devices: Record<string, StepPeaks>;
}

export interface WorkerEntry extends Absent<Omit<contract.PackedWorker, "steps">, "monitored" | "model" | "dump_of"> {
  steps: StepEntry[];
}

export interface RunEntry extends Absent<Omit<contract.PackedRun, "workers">, "end_ns"> {
  workers: WorkerEntry[];
}

export interface RunsAnswer extends Omit<contract.PackedRuns, "runs"> {
  runs: RunEntry[];
}

/** Exported pages have curves and lanes of their own, always over time. */
export type CurveAnswer = Absent<contract.CurveAnswer, "over" | "labels">;

export interface LanesAnswer extends Absent<contract.LanesAnswer, "over"> {
  /** What `modules` holds, where it is something else. */
  label?: string;
}

/** Also of recorded steps, of which some may have no reserved memory. */
export interface StepsAnswer extends Omit<contract.StepsAnswer, "reserved"> {
  reserved: (number | null)[] | null;
}

export interface CompareSide extends contract.CompareSide {
  /** The only step of a recording that marked none. */
  alone?: boolean;
}

export interface CompareAnswer extends contract.CompareAnswer {
  base: CompareSide;
  other: CompareSide;
}

/** Numbers in answers that stand for something: states of `Pieces`, labels of `Nodes`. */

export const ALLOCATED = 0;
export const PENDING = 1;
export const FREE = 2;

export const ROOT = -1;
export const WITHOUT = -2;
