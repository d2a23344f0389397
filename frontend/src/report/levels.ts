/** Levels from changes: the state at any moment, and curves that never miss a peak. */
import type { CurveAnswer } from "../api/types";
import { bisect } from "../draw/bisect";
import type { AxisName, Device, Division, Steps } from "./recording";

const EVERY = 1024;

/** Bytes of each key before change 0, EVERY, 2*EVERY, ...: from there a state is a few steps away. */
export class Levels {
  readonly keys: number;
  private readonly kept: Float64Array;

  constructor(
    readonly device: Device,
    readonly division: Division,
  ) {
    const { change } = device;
    this.keys = division.keys.length;
    const blocks = Math.floor(change.length / EVERY) + 1;
    this.kept = new Float64Array(blocks * this.keys);
    const level = Float64Array.from(division.start);
    for (let i = 0; i <= change.length; i++) {
      if (i % EVERY === 0) this.kept.set(level, (i / EVERY) * this.keys);
      if (i < change.length) level[division.code[i]!]! += change[i]!;
    }
  }

  /** Bytes of each key after the first `count` changes. */
  after(count: number): Float64Array {
    const block = Math.floor(count / EVERY);
    const level = this.kept.slice(block * this.keys, (block + 1) * this.keys);
    for (let i = block * EVERY; i < count; i++) level[this.division.code[i]!]! += this.device.change[i]!;
    return level;
  }
}

/** How many values lie at or before (or, if `open`, before) a place on an axis. */
export function countTo(places: Float64Array, place: number, open = false): number {
  return bisect(places.length, (i) => (open ? places[i]! >= place : places[i]! > place));
}

/**
 * The curve over [t0, t1] in `px` columns, as the server would answer it: in each the exact lowest and highest
 * level, from the one it begins with, and what the highest is made of.
 */
export function curveOf(levels: Levels, axis: AxisName, t0: number, t1: number, px: number): CurveAnswer {
  const { device, division } = levels;
  const places = device[axis];
  const { change, event } = device;
  const stacks = Array.from({ length: levels.keys }, () => new Array<number>(px).fill(0));
  const [min, max] = [new Array<number>(px), new Array<number>(px)];
  const level = levels.after(countTo(places, t0, true));
  let total = level.reduce((sum, bytes) => sum + bytes, 0);
  let next = countTo(places, t0, true);
  let top = { bytes: -1, column: 0, count: next };
  for (let c = 0; c < px; c++) {
    const last = c === px - 1;
    const stop = countTo(places, last ? t1 : t0 + ((t1 - t0) * (c + 1)) / px, !last);
    let [low, high] = [total, total];
    keep(stacks, c, level);
    if (total > top.bytes) top = { bytes: total, column: c, count: next };
    for (; next < stop; next++) {
      level[division.code[next]!]! += change[next]!;
      total += change[next]!;
      if (event[next + 1] === event[next]) continue; // one event ended a block and began another
      if (total < low) low = total;
      if (total > high) {
        high = total;
        keep(stacks, c, level);
        if (total > top.bytes) top = { bytes: total, column: c, count: next + 1 };
      }
    }
    [min[c], max[c]] = [low, high];
  }
  const at = top.count > 0 ? places[top.count - 1]! : t0;
  return {
    t0,
    t1,
    px,
    min,
    max,
    reserved: device.reserved && highest(device.reserved, axis, t0, t1, px),
    keys: division.keys,
    stacks,
    peak: { time_ns: Math.max(t0, at), bytes: top.bytes, column: top.column, event: event[top.count - 1] ?? -1 },
    exact: true,
  };
}

function keep(stacks: number[][], column: number, level: Float64Array): void {
  for (let k = 0; k < level.length; k++) stacks[k]![column] = level[k]!;
}

function highest(steps: Steps, axis: AxisName, t0: number, t1: number, px: number): number[] {
  const places = steps[axis];
  let next = countTo(places, t0, true);
  let level = next > 0 ? steps.bytes[next - 1]! : steps.start;
  return Array.from({ length: px }, (_, c) => {
    const last = c === px - 1;
    const stop = countTo(places, last ? t1 : t0 + ((t1 - t0) * (c + 1)) / px, !last);
    let high = level;
    for (; next < stop; next++) {
      level = steps.bytes[next]!;
      if (level > high) high = level;
    }
    return high;
  });
}

export interface State {
  /** Changes so far. */
  count: number;
  event: number;
  place: number;
  bytes: number;
  reserved: number | null;
  parts: { key: string; bytes: number }[];
}

/** The state after the last event at or before a place. */
export function stateAt(levels: Levels, axis: AxisName, place: number): State {
  return stateAfter(levels, axis, countTo(levels.device[axis], place));
}

/** The state after a number of changes. */
export function stateAfter(levels: Levels, axis: AxisName, count: number): State {
  const { device, division } = levels;
  const level = levels.after(count);
  const event = count > 0 ? device.event[count - 1]! : -1;
  const { reserved } = device;
  const before = reserved ? countTo(reserved.event, event) : 0;
  return {
    count,
    event,
    place: count > 0 ? device[axis][count - 1]! : Math.min(0, device[axis][0] ?? 0),
    bytes: level.reduce((sum, bytes) => sum + bytes, 0),
    reserved: reserved && (before > 0 ? reserved.bytes[before - 1]! : reserved.start),
    parts: division.keys.map((key, k) => ({ key, bytes: level[k]! })),
  };
}

/** The count of changes one event further (+1) or back (-1): an event's changes belong together. */
export function neighbor(device: Device, count: number, by: 1 | -1): number {
  const { event } = device;
  let next = Math.min(Math.max(count + by, 0), event.length);
  while (next > 0 && next < event.length && event[next] === event[next - 1]) next += by;
  return next;
}
