/** Bytes as people read them: one unit per table, three or four digits, the exact count on hover. */

import { decimals, grouped } from "./numbers";

export interface Unit {
  name: string;
  size: number;
}

const UNITS: readonly Unit[] = [
  { name: "B", size: 1 },
  { name: "KiB", size: 2 ** 10 },
  { name: "MiB", size: 2 ** 20 },
  { name: "GiB", size: 2 ** 30 },
  { name: "TiB", size: 2 ** 40 },
];

/** The largest unit of which the largest of these values is at least one. */
export function unitFor(...values: number[]): Unit {
  const largest = Math.max(0, ...values.map(Math.abs));
  return UNITS.findLast((unit) => largest >= unit.size) ?? UNITS[0]!;
}

/** The page's unit, or a smaller one where even the largest of these values is less than a tenth of it. */
export function unitWithin(page: Unit, largest: number): Unit {
  return largest >= page.size / 10 ? page : unitFor(largest);
}

/** A part of something, in the unit of the whole; only less than a tenth of it has a smaller unit. */
export function asPartOf(whole: number, bytes: number): string {
  return withUnit(bytes, unitWithin(unitFor(whole), Math.abs(bytes)));
}

/** The number alone, in a unit that the table names once. Never shows 0.00 for something that is there. */
export function inUnit(bytes: number, unit: Unit): string {
  if (unit.size === 1) return grouped(bytes);
  if (bytes !== 0 && roundsAway(bytes, unit)) return bytes > 0 ? "< 0.01" : "> −0.01";
  return decimals(bytes / unit.size, digitsOf(Math.abs(bytes) / unit.size));
}

/** Decimals that make three or four digits: 3.42, 28.09, 154.8, 1,023. */
function digitsOf(value: number): number {
  return value < 99.995 ? 2 : value < 999.95 ? 1 : 0;
}

export function withUnit(bytes: number, unit: Unit = unitFor(bytes)): string {
  return `${inUnit(bytes, unit)} ${unit.name}`;
}

/** A signed change; a dash where nothing changed. */
export function deltaInUnit(bytes: number, unit: Unit): string {
  if (bytes === 0) return "–";
  if (unit.size > 1 && roundsAway(bytes, unit)) return bytes > 0 ? "< +0.01" : "> −0.01";
  return (bytes > 0 ? "+" : "") + inUnit(bytes, unit);
}

/** A signed change with its unit: the given one, or its own where that would round it away. */
export function deltaWithUnit(bytes: number, unit: Unit): string {
  return `${bytes > 0 ? "+" : bytes < 0 ? "−" : ""}${changeWithUnit(bytes, unit)}`;
}

/** The same without its sign. */
export function changeWithUnit(bytes: number, unit: Unit): string {
  return withUnit(Math.abs(bytes), roundsAway(bytes, unit) ? unitFor(bytes) : unit);
}

function roundsAway(bytes: number, unit: Unit): boolean {
  return Math.abs(bytes) / unit.size < 0.005;
}

export function exactBytes(bytes: number): string {
  return `${grouped(bytes)} bytes`;
}

export function percent(part: number, whole: number): string {
  if (whole <= 0) return "–";
  const share = (100 * part) / whole;
  if (share > 0 && share < 0.05) return "< 0.1 %";
  return `${decimals(share, 1)} %`;
}
