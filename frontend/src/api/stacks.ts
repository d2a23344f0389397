/** The answers about call stacks and single allocations, as docs/http_api.md tells them. */
import type { Allocation } from "./types";

export type Kind = "user" | "library" | "native" | "none";

export interface Frame {
  text: string;
  function: string;
  file: string;
  line: number;
  kind: "user" | "library" | "native";
  fx: string;
}

export interface Found {
  bytes: number;
  count: number;
}

/** What every answer about stacks begins with. */
export interface Whole {
  of: "moment" | "step";
  event: number | null;
  time_ns: number | null;
  bytes: number;
  count: number;
  found: Found | null;
}

export const ROOT = -1;
export const WITHOUT = -2;

/** Columns of one length, parents first. */
export interface Nodes {
  id: number[];
  parent: number[];
  label: number[];
  run: number[][];
  bytes: number[];
  count: number[];
  own: number[];
  found: number[];
}

export interface StacksAnswer extends Whole {
  knows_stacks: boolean;
  frames: Frame[];
  node: number;
  nodes: Nodes;
  omitted: number;
}

export interface StackLine {
  line: string;
  kind: Kind;
  bytes: number;
  count: number;
  per_call: number;
  stack: number[];
  forward: number[];
}

export interface StackTableAnswer extends Whole {
  rows_found: number;
  first: number;
  frames: Frame[];
  rows: StackLine[];
}

export interface SourceLine {
  line: string;
  kind: Kind;
  bytes: number;
  count: number;
  median: number;
}

export interface LineTableAnswer extends Whole {
  rows_found: number;
  first: number;
  rows: SourceLine[];
}

export interface RuleTableAnswer extends Whole {
  rows: { key: string; bytes: number; count: number }[];
}

export interface DivisionsAnswer {
  divisions: string[];
}

export interface BandsAnswer {
  over: "time" | "event";
  t0: number;
  t1: number;
  px: number;
  min: number[];
  max: number[];
  bands: { row: number[]; bytes: number[]; first: number[]; last: number[]; key: number[] };
  rest: number[];
  others: number;
  /** What is in the rest, by key; null where nothing is. */
  parts: number[][] | null;
  keys: { key: string; label: string; bytes: number; count: number }[];
  peak: { event: number; time_ns: number; bytes: number; column: number };
  first_event: number;
  last_event: number;
}

export interface Listed extends Allocation {
  row: number;
  version: number;
  line: string | null;
  kind: Kind;
  lifetime_ns: number | null;
}

export interface AllocationsAnswer {
  rows_found: number;
  bytes_found: number;
  rows_all: number;
  first: number;
  rows: Listed[];
}

export interface AllocationAnswer extends Listed {
  rounded_bytes: number | null;
  pool: string;
  stream: string;
  context: string | null;
  annotation: string | null;
  born_event: number | null;
  freed_event: number | null;
  first_ns: number;
  last_ns: number;
  frames: Frame[];
  stack: number[];
  forward: number[];
}
