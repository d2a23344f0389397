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

export function timeUnitFor(ns: number): TimeUnit {
  return UNITS.findLast((unit) => Math.abs(ns) >= unit.ns) ?? UNITS[0]!;
}

export function inTimeUnit(ns: number, unit: TimeUnit, digits = unit.ns === 1 ? 0 : 2): string {
  return decimals(ns / unit.ns, digits);
}

export function duration(ns: number): string {
  const unit = timeUnitFor(ns);
  return `${inTimeUnit(ns, unit)} ${unit.name}`;
}

export function exactTime(ns: number): string {
  return `${grouped(ns)} ns`;
}
