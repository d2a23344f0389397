/** Nanoseconds as people read them. */

import { decimals, grouped } from "./numbers";

export interface TimeUnit {
  name: string;
  ns: number;
}

const UNITS: readonly TimeUnit[] = [
  { name: "ns", ns: 1 },
  { name: "µs", ns: 1e3 },
  { name: "ms", ns: 1e6 },
  { name: "s", ns: 1e9 },
];

/** The largest unit of which the longest of these is at least one. */
export function timeUnitFor(...ns: number[]): TimeUnit {
  const longest = Math.max(...ns.map(Math.abs));
  return UNITS.findLast((unit) => longest >= unit.ns) ?? UNITS[0]!;
}

export function inTimeUnit(ns: number, unit: TimeUnit, digits = unit.ns === 1 ? 0 : 2): string {
  return decimals(ns / unit.ns, digits);
}

export function duration(ns: number, unit = timeUnitFor(ns)): string {
  return `${inTimeUnit(ns, unit)} ${unit.name}`;
}

export function exactTime(ns: number): string {
  return `${grouped(ns)} ns`;
}
