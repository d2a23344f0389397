/** Ranks side by side: what the view says of them, and what one cell of its map is. */
import type { Rank, RanksAnswer } from "../api/types";
import { percent, type Unit, unitWithin, withUnit } from "./bytes";
import { shortened, visible } from "./names";
import { grouped } from "./numbers";
import { readOrder } from "./route";
import type { Piece } from "./sentences";
import { inOrder } from "./selection";

/** Ranks that differ by less are called equal. */
export const EQUAL = 0.01;

/** "rank3 peaks highest: 18.53 GiB at step 42, 2.10 GiB (12.8 %) above the median rank." Of two ranks or more. */
export function ranksSentence(answer: RanksAnswer, unit: Unit): Piece[] {
  const { rows, of } = answer;
  const top = highestRank(rows);
  const low = rows.reduce((least, row) => Math.min(least, row.highest_bytes), top.highest_bytes);
  const resident = measured(answer) === of ? "" : " of resident memory";
  const size: Piece = { strong: `${top.at_least ? "≥ " : ""}${withUnit(top.highest_bytes, unit)}`, exact: top.highest_bytes };
  const what = of === "reserved" ? "reserve" : "peak";
  const where = oneStep(rows) ? resident : `${resident} at step ${top.highest_step}`;
  if (low === top.highest_bytes) return [`${everyRank(rows)} ${what} at the same `, size, `${resident}, to the byte.`];
  const name: Piece = { name: rankName(top, rows) };
  if (top.highest_bytes - low <= EQUAL * top.highest_bytes)
    return [
      `${everyRank(rows)} ${what} within `,
      { strong: percent(top.highest_bytes - low, top.highest_bytes), exact: top.highest_bytes - low },
      " of one another: ",
      name,
      " highest, with ",
      size,
      `${where}.`,
    ];
  return [name, of === "reserved" ? " reserves most: " : " peaks highest: ", size, where, ...above(top, unit, rows)];
}

function above({ highest_bytes, median }: Rank, unit: Unit, rows: Rank[]): Piece[] {
  if (!median) return [`; no other ${nounOf(rows)} has that step.`];
  const more = highest_bytes - median.bytes;
  if (more === 0) return [`, as much as the median ${nounOf(rows)}.`];
  const share = percent(more, median.bytes);
  const size: Piece = { strong: withUnit(Math.abs(more), unitWithin(unit, Math.abs(more))), exact: more };
  if (rows.length === 2) return [", ", size, ` (${share}) above `, { name: rankName(median, rows) }, "."];
  return [", ", size, ` (${share}) above the median ${nounOf(rows)}.`];
}

/** What the bytes are, in words: of a process the system counts what is resident. */
export function measured({ of, rows }: RanksAnswer): string {
  return rows.some((row) => row.device === "process") ? "resident memory" : of;
}

function everyRank(rows: Rank[]): string {
  return `${rows.length === 2 ? "Both" : `All ${grouped(rows.length)}`} ${nounOf(rows)}s`;
}

/** Of those that peak highest, the first. */
export function highestRank(rows: Rank[]): Rank {
  return rows.reduce((top, row) => (row.highest_bytes > top.highest_bytes ? row : top));
}

/** Whether nobody told steps apart, as in an estimate or a snapshot. */
export function oneStep(rows: Rank[]): boolean {
  return rows.every((row) => row.count === 1 && row.highest_step === 0);
}

/** What a row is. */
export function nounOf(rows: Rank[]): "rank" | "device" {
  return severalDevices(rows) ? "device" : "rank";
}

export function severalDevices(rows: Rank[]): boolean {
  return new Set(rows.map((row) => row.worker)).size < rows.length;
}

/** The worker, and the device where any worker has several; of a single worker only the device. */
export function rankName({ worker, device }: { worker: string; device: string }, rows: Rank[]): string {
  if (!severalDevices(rows)) return worker;
  return severalWorkers(rows) ? `${worker} ${device}` : device;
}

function severalWorkers(rows: Rank[]): boolean {
  return rows.some((row) => row.worker !== rows[0]!.worker);
}

/** Names of at most so many letters: what all workers begin with is cut first, then the middle; the device stays. */
export function shortNames(rows: Rank[], letters: number): string[] {
  const devices = severalDevices(rows);
  if (devices && !severalWorkers(rows)) return rows.map((row) => shortened(visible(row.device), Math.max(LEAST_LETTERS, letters)));
  const longest = Math.max(0, ...rows.map((row) => visible(rankName(row, rows)).length));
  const same = longest > letters ? sharedBeginning([...new Set(rows.map((row) => visible(row.worker)))]) : 0;
  return rows.map((row) => {
    const worker = visible(row.worker);
    const device = devices ? ` ${visible(row.device)}` : "";
    const own = same > 0 ? `…${worker.slice(same)}` : worker;
    return shortened(own, Math.max(LEAST_LETTERS, letters - device.length)) + device;
  });
}

const LEAST_LETTERS = 5;

/** How many letters all of several names begin with, up to a mark between words and never all of one. */
function sharedBeginning(names: string[]): number {
  if (names.length < 2) return 0;
  const [first, ...others] = names as [string, ...string[]];
  let same = 0;
  while (same < first.length - 1 && others.every((name) => same < name.length - 1 && name[same] === first[same])) same++;
  return first.slice(0, same).search(/[^a-zA-Z0-9][a-zA-Z0-9]*$/) + 1;
}

/** The cell that a worker, device and step lie in; null where the map has none. */
export interface Cell {
  row: number;
  column: number;
}

export function cellOf(answer: RanksAnswer, pick: { worker: string; device: string; step: number }): Cell | null {
  const row = answer.rows.findIndex((rank) => rank.worker === pick.worker && rank.device === pick.device);
  const column = answer.last.findIndex((last) => last >= pick.step);
  return row < 0 || column < 0 || answer.first[column]! > pick.step ? null : { row, column };
}

export interface CellFigures {
  rank: Rank;
  bytes: number | null;
  /** The step of the highest, where there is one. */
  step: number | null;
  /** The column's steps. */
  first: number;
  last: number;
  /** Of the ranks that have a cell in the column: of an even number the lower of the two in the middle. */
  median: number | null;
  ranks: number;
}

export function figuresOf(answer: RanksAnswer, { row, column }: Cell): CellFigures {
  const rank = answer.rows[row]!;
  const all = answer.rows.flatMap((one) => one.bytes[column] ?? []).sort((a, b) => a - b);
  const bytes = rank.bytes[column] ?? null;
  return {
    rank,
    bytes,
    step: bytes === null ? null : rank.steps ? rank.steps[column]! : answer.first[column]!,
    first: answer.first[column]!,
    last: answer.last[column]!,
    median: all.length > 1 ? all[(all.length - 1) >> 1]! : null,
    ranks: all.length,
  };
}

/** From which value to which the colors run; a change of a thousandth must not look like a cliff. */
export function colorRange(answer: RanksAnswer, shares: boolean): [number, number] {
  if (shares) return [0, 1];
  let [low, high] = [Infinity, 0];
  for (const { bytes } of answer.rows)
    for (const value of bytes) if (value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [Math.max(0, Math.min(low, high - Math.max(1, 0.08 * high))), Math.max(1, high)];
}

export const ORDERS = ["worker", "highest", "step", "median", "spread"] as const;
export type Order = (typeof ORDERS)[number];

const VALUES: Record<Exclude<Order, "worker">, (row: Rank) => number> = {
  highest: (row) => row.highest_bytes,
  step: (row) => row.highest_step,
  median: (row) => overMedian(row) ?? -Infinity,
  spread: (row) => row.highest_bytes - row.lowest_bytes,
};

export function overMedian({ highest_bytes, median }: Rank): number | null {
  return median ? highest_bytes - median.bytes : null;
}

/** Rows of the answer in an order, numbers from the largest; equal ones by name. */
export function ordered(rows: Rank[], text?: string): Rank[] {
  const { by, turned } = readOrder(text, ORDERS, "highest");
  const names = (a: Rank, b: Rank): number => inOrder(a.worker, b.worker) || inOrder(a.device, b.device);
  const value = by === "worker" ? null : VALUES[by];
  const compare = value ? (a: Rank, b: Rank) => descending(value(a), value(b)) : names;
  return [...rows].sort((a, b) => (turned ? compare(b, a) : compare(a, b)) || names(a, b));
}

function descending(a: number, b: number): number {
  return a === b ? 0 : b > a ? 1 : -1;
}
