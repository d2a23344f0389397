/** The answers of the Allocator's routes, as docs/http_api.md tells them. Bytes, and nanoseconds since the window's start. */
import type { Allocation, LabeledPart, Over, Part } from "./types";

export type { Over };

export type ColorBy = "category" | "module" | "line" | "pool" | "stream";
export type Order = "pool" | "size" | "free" | "address";

export interface Mark {
  event: number;
  time_ns: number;
  bytes: number;
  unused: number | null;
}

export interface FailedRequest {
  number: number;
  event: number;
  time_ns: number;
  step: number;
  requested_bytes: number;
}

export interface ReserveCurve {
  over: Over;
  t0: number;
  t1: number;
  px: number;
  low: number[];
  allocated: number[];
  pending: number[];
  reserved: number[] | null;
  unused: (number | null)[] | null;
  split: [number, number, number][];
  peak: Mark;
  reserved_peak: Mark | null;
  ooms: FailedRequest[];
  first_event: number;
  last_event: number;
  knows_segments: boolean;
}

export interface Pool {
  pool: string;
  stream: string;
  allocated_bytes: number;
  pending_bytes: number;
  rounded_bytes: number;
  by_rule_bytes: number;
  reserved_bytes: number | null;
  segments: number | null;
  free_bytes: number | null;
  largest_free_bytes: number | null;
}

export interface FreeBlocks {
  from_bytes: number;
  count: number;
  bytes: number;
}

export interface AllocatorState {
  event: number;
  time_ns: number;
  previous_event: number | null;
  next_event: number | null;
  previous_event_ns: number | null;
  next_event_ns: number | null;
  what: { kind: string; bytes: number; address: string; line: string | null } | null;
  active_bytes: number;
  allocated_bytes: number;
  pending_bytes: number;
  reserved_bytes: number | null;
  unused: number | null;
  free_bytes: number | null;
  largest_free_bytes: number | null;
  split: number | null;
  pools: Pool[];
  free: FreeBlocks[];
  outside: { bytes: number; count: number };
  knows_segments: boolean;
  settings: Record<string, string>;
}

export interface Home {
  pool: string;
  stream: string;
  segments: number;
  bytes: number;
}

export const ALLOCATED = 0;
export const PENDING = 1;
export const FREE = 2;

/** Columns of one length; see `allocator_segments`. */
export interface Pieces {
  segment: number[];
  offset: number[];
  bytes: number[];
  requested: number[];
  state: number[];
  key: number[];
  row: number[];
  count: number[];
}

export interface SegmentsAnswer {
  event: number;
  by: ColorBy;
  order: Order;
  segments: { address: string[]; bytes: number[]; free: number[]; home: number[]; expandable: number[] };
  homes: Home[];
  keys: LabeledPart[];
  first: number;
  last: number;
  finest: number;
  pieces: Pieces;
}

export interface BlockAnswer extends Allocation {
  rounded_bytes: number | null;
  by_rule: boolean | null;
  segment: { address: string; bytes: number; offset: number } | null;
  state: "allocated" | "pending" | "gone";
  born_event: number | null;
  freed_event: number | null;
  pending_event: number | null;
  pending_ns: number | null;
  pool: string;
  stream: string;
  context: string | null;
  stack: string[];
}

/** All failed requests of the window; reports of the last ones, and of the first in the step. */
export interface FailedRequests {
  ooms: FailedRequest[];
  reports: OomReport[];
}

export interface OomReport extends FailedRequest {
  new_segment_bytes: number;
  free_bytes: number | null;
  reserved_bytes: number | null;
  active_bytes: number;
  pending_bytes: number;
  pool: string;
  stream: string;
  reserve_free_bytes: number | null;
  usable_free_bytes: number | null;
  largest_usable_bytes: number | null;
  largest_free_bytes: number | null;
  cause: string;
  why: string;
  by_category: Part[];
  lines: { line: string; stack: string; stacks: number; bytes: number; count: number }[];
  other_lines: { lines: number; bytes: number; count: number };
}
