/** All runs side by side: what the view says of them, their causes and their orders. */
import type { FleetRun } from "../api/types";
import { asPartOf, percent, unitFor, withUnit } from "./bytes";
import { counted, grouped } from "./numbers";
import { EQUAL } from "./ranks";
import { readOrder } from "./route";
import { runName } from "./run_name";
import { inOrder } from "./selection";
import type { Piece } from "./sentences";

export type Cause = "failed" | "growth";

/** Why a run is worth a look: a request that failed comes before memory that grows. */
export function causeOf(row: FleetRun): Cause | null {
  if (row.failed) return "failed";
  return row.growing ? "growth" : null;
}

/** Runs with one cause have one key: those that ran out at the same source line, those that grow. */
export function causeKey(row: FleetRun): string | null {
  const cause = causeOf(row);
  return cause === "failed" ? `failed ${row.failed!.line ?? ""}` : cause;
}

export interface CauseGroup {
  key: string;
  cause: Cause;
  /** Where the last request failed; null where that is not known, and for growth. */
  line: string | null;
  count: number;
}

/** The largest group first. */
export function causeGroups(rows: FleetRun[]): CauseGroup[] {
  const groups = new Map<string, CauseGroup>();
  for (const row of rows) {
    const key = causeKey(row);
    if (key === null) continue;
    const group = groups.get(key) ?? { key, cause: causeOf(row)!, line: row.failed?.line ?? null, count: 0 };
    groups.set(key, { ...group, count: group.count + 1 });
  }
  return [...groups.values()].sort((a, b) => b.count - a.count || inOrder(a.key, b.key));
}

/** "18 of 500 runs ran out of memory, 12 of them at `train.py:42 (step)`. 50 more grow step after step." */
export function fleetSentence(rows: FleetRun[]): Piece[] {
  const failed = rows.filter((row) => row.failed).length;
  const grow = rows.filter((row) => causeOf(row) === "growth").length;
  return [...outOfMemory(rows, failed), ...(grow > 0 ? [` ${growing(grow, rows.length, failed > 0)}`] : [])];
}

function outOfMemory(rows: FleetRun[], failed: number): Piece[] {
  const runs = counted(rows.length, "run");
  if (failed === 0) return [rows.every((row) => row.failed_known) ? `None of ${runs} ran out of memory.` : `No run of ${grouped(rows.length)} is known to have run out of memory.`];
  const [top] = causeGroups(rows).filter((group) => group.line !== null);
  const where: Piece[] = top && top.count > 1 ? [`, ${grouped(top.count)} of them at the same line, `, { name: top.line! }] : [];
  return [{ strong: `${grouped(failed)} of ${runs}` }, " ran out of memory", ...where, "."];
}

function growing(count: number, of: number, others: boolean): string {
  const verb = count === 1 ? "grows" : "grow";
  return `${grouped(count)}${others ? " more" : ` of ${grouped(of)}`} ${verb} step after step.`;
}

/** The peak of allocated memory; null where only the process was watched. */
export function allocatedPeak({ device, peak_bytes }: FleetRun): number | null {
  return device === "process" ? null : peak_bytes;
}

/** "`a/run7` peaks highest: 39.87 GiB, 0.13 GiB below what its device has. The process of `b` is highest: 3.50 GiB resident." */
export function highestSentence(rows: FleetRun[]): Piece[] {
  const process = highestBy(rows, (row) => row.process?.bytes ?? null);
  const top = highestBy(rows, allocatedPeak);
  const resident = process?.process;
  return [
    ...(top ? allocatedSentence(top) : []),
    ...(resident ? [`${top ? " " : ""}The process of `, { name: runName(process.run) }, " is highest: ", sizeOf(resident.bytes), " resident."] : []),
  ];
}

function highestBy(rows: FleetRun[], bytesOf: (row: FleetRun) => number | null): FleetRun | undefined {
  return [...rows].filter((row) => bytesOf(row) !== null).sort((a, b) => bytesOf(b)! - bytesOf(a)!)[0];
}

function sizeOf(bytes: number): Piece {
  return { strong: withUnit(bytes), exact: bytes };
}

function allocatedSentence(top: FleetRun): Piece[] {
  const room = headroom(top);
  const unit = unitFor(top.peak_bytes);
  const size: Piece = { strong: `${top.at_least ? "≥ " : ""}${withUnit(top.peak_bytes, unit)}`, exact: top.peak_bytes };
  return [{ name: runName(top.run) }, " peaks highest: ", size, room === null ? "." : `, ${withUnit(Math.abs(room), unit)} ${room < 0 ? "above" : "below"} the ${withUnit(top.capacity_bytes!, unit)} of its device.`];
}

/** What the device has beyond the peak; null where its memory is not known. */
export function headroom({ capacity_bytes, peak_bytes }: FleetRun): number | null {
  return capacity_bytes === null ? null : capacity_bytes - peak_bytes;
}

/** The rows with a text in the run's name, the rank's or the source line, whatever the case. */
export function withText(rows: FleetRun[], text: string): FleetRun[] {
  const wanted = text.toLowerCase();
  return rows.filter((row) => [runName(row.run), row.worker, row.failed?.line ?? ""].some((one) => one.toLowerCase().includes(wanted)));
}

export const FLEET_ORDERS = ["run", "peak", "resident", "headroom", "growth", "cause", "ranks", "steps"] as const;
export type FleetOrder = (typeof FLEET_ORDERS)[number];

const VALUES: Record<Exclude<FleetOrder, "run">, (row: FleetRun) => number> = {
  peak: (row) => allocatedPeak(row) ?? -1,
  resident: (row) => row.process?.bytes ?? -1,
  headroom: (row) => -(headroom(row) ?? Infinity), // the least room is the worst
  growth: (row) => row.growth_bytes ?? -1,
  cause: (row) => (row.failed ? 2 : row.growing ? 1 : 0),
  ranks: (row) => row.ranks,
  steps: (row) => row.steps,
};

/** Rows in an order, numbers from the largest; equal ones by cause, then the highest first. */
export function inFleetOrder(rows: FleetRun[], text?: string): FleetRun[] {
  const { by, turned } = readOrder(text, FLEET_ORDERS, "cause");
  const names = (a: FleetRun, b: FleetRun): number => inOrder(a.run, b.run);
  const keys = (a: FleetRun, b: FleetRun): number => (by === "cause" ? inOrder(causeKey(a) ?? "", causeKey(b) ?? "") : 0);
  const compare = by === "run" ? names : (a: FleetRun, b: FleetRun) => VALUES[by](b) - VALUES[by](a) || 0;
  return [...rows].sort((a, b) => (turned ? compare(b, a) : compare(a, b)) || keys(a, b) || b.peak_bytes - a.peak_bytes || names(a, b));
}

/** What other ranks (or devices) of a run do that the picked one does not: which peaks highest, by how much, and which grows. */
export function otherRanks(row: FleetRun, picked: { worker: string; device: string }, noun: "rank" | "device" = "rank"): Piece[] {
  const { ranks, peak_bytes, median, growing } = row;
  if (ranks < 2) return [];
  const unit = unitFor(peak_bytes);
  const isTop = same(row, picked);
  const above = median && peak_bytes - median.bytes > EQUAL * peak_bytes ? `${percent(peak_bytes - median.bytes, median.bytes)} above ` : "";
  const pieces: Piece[] = [];
  if (above !== "") {
    const size: Piece = { strong: withUnit(peak_bytes, unit), exact: peak_bytes };
    pieces.push(...(isTop ? ["This one peaks highest"] : [{ name: rankOf(row, row, noun) }, " peaks highest"]));
    const when = row.steps === 1 ? "" : ` at step ${row.step}`;
    pieces.push(` of ${grouped(ranks)} ${noun}s: `, size, `${when}, ${above}`, ...(ranks === 2 ? [{ name: rankOf(median!, row, noun) }] : [`the median ${noun}`]), ".");
  }
  if (growing) {
    const size: Piece = { strong: asPartOf(peak_bytes, growing.bytes), exact: growing.bytes };
    const who: Piece[] = same(growing, row) && above !== "" ? ["It"] : same(growing, picked) ? [`This ${noun}`] : [{ name: rankOf(growing, row, noun) }];
    pieces.push(pieces.length > 0 ? " " : "", ...who, " grows by ", size, " with every step.");
  }
  return pieces;
}

/** The rank that needs a look: the one that grows, else the highest; null where it is the picked one. */
export function rankToOpen(row: FleetRun, picked: { worker: string; device: string }): { worker: string; device: string; step?: string } | null {
  const top = { worker: row.worker, device: row.device, step: String(row.step) };
  const wanted = row.growing && !same(row.growing, row) && same(row, picked) ? { worker: row.growing.worker, device: row.growing.device } : top;
  return same(wanted, picked) ? null : wanted;
}

interface OfRank {
  worker: string;
  device: string;
}

function same(a: OfRank, b: OfRank): boolean {
  return a.worker === b.worker && a.device === b.device;
}

/** The device of a run that has one worker; else the worker, and its device where another one of it peaks highest. */
export function rankOf({ worker, device }: OfRank, row: FleetRun, noun: "rank" | "device"): string {
  if (noun === "device") return device;
  return worker === row.worker && device !== row.device ? `${worker} ${device}` : worker;
}
