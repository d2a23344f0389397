import { describe, expect, it } from "vitest";
import { countTo, curveOf, Levels, neighbor, stateAfter, stateAt } from "../../src/report/levels";
import { type Device, type ReportData, wholeOf } from "../../src/report/recording";

/** 100 bytes of `a` from the start; +50 b at 10, −100 a and +70 b at 20 (one event), −50 b at 30. */
const device = {
  time: Float64Array.of(10, 20, 20, 30),
  event: Float64Array.of(0, 1, 1, 4),
  change: Float64Array.of(50, -100, 70, -50),
  reserved: { start: 200, time: Float64Array.of(20), event: Float64Array.of(1), bytes: Float64Array.of(300) },
  divisions: [{ keys: ["a", "b"], start: [100, 0], code: Float64Array.of(1, 0, 1, 1) }],
} as unknown as Device;
const levels = new Levels(device, device.divisions[0]!);

describe("a state", () => {
  it("holds from its event until the next one", () => {
    expect(stateAt(levels, "time", 9).bytes).toBe(100);
    expect(stateAt(levels, "time", 10).bytes).toBe(150);
    expect(stateAt(levels, "time", 29)).toMatchObject({ event: 1, bytes: 120, reserved: 300 });
    expect(stateAt(levels, "event", 3)).toMatchObject({ event: 1, bytes: 120 });
  });
  it("is divided into parts that sum to it", () => {
    expect(stateAt(levels, "time", 20).parts).toEqual([
      { key: "a", bytes: 0 },
      { key: "b", bytes: 120 },
    ]);
  });
  it("before all events is the start", () => {
    expect(stateAfter(levels, "time", 0)).toMatchObject({ event: -1, bytes: 100, reserved: 200 });
  });
});

describe("stepping", () => {
  it("takes the changes of one event together", () => {
    expect([0, 1, 3].map((count) => neighbor(device, count, 1))).toEqual([1, 3, 4]);
    expect([4, 3, 1].map((count) => neighbor(device, count, -1))).toEqual([3, 1, 0]);
  });
});

describe("a curve", () => {
  it("has the exact lowest and highest of each column, and what the highest is made of", () => {
    const curve = curveOf(levels, "time", 0, 40, 2);
    expect([curve.min, curve.max]).toEqual([
      [100, 70],
      [150, 150],
    ]);
    expect(curve.stacks).toEqual([
      [100, 100],
      [50, 50],
    ]);
    expect(curve.peak).toEqual({ time_ns: 10, bytes: 150, column: 0, event: 0 });
    expect(curve.reserved).toEqual([200, 300]);
  });
  it("never shows what is between the changes of one event", () => {
    const curve = curveOf(levels, "time", 15, 25, 1);
    expect([curve.min[0], curve.max[0]]).toEqual([120, 150]);
  });
  it("shows a narrow window as exactly as the whole", () => {
    expect(curveOf(levels, "time", 30, 31, 3).max).toEqual([120, 70, 70]);
  });
});

it("counts to a place, or up to before it", () => {
  expect([countTo(device.time, 20), countTo(device.time, 20, true)]).toEqual([3, 1]);
});

it("keeps states far apart exact", () => {
  const n = 5000;
  const many = {
    ...device,
    time: Float64Array.from({ length: n }, (_, i) => i),
    event: Float64Array.from({ length: n }, (_, i) => i),
    change: new Float64Array(n).fill(3),
    divisions: [{ keys: ["a", "b"], start: [1, 0], code: Float64Array.from({ length: n }, (_, i) => i % 2) }],
  } as unknown as Device;
  const long = new Levels(many, many.divisions[0]!);
  for (const count of [0, 1023, 1024, 1025, 4096, 5000])
    expect(Array.from(long.after(count))).toEqual([1 + 3 * Math.ceil(count / 2), 3 * Math.floor(count / 2)]);
});

describe("the whole of an axis", () => {
  it("is the range of events that is drawn, and never empty", () => {
    const drawn = (first_event: number, events: number) => ({ first_event, events }) as ReportData;
    expect(wholeOf(drawn(0, 5), device, "event")).toEqual([0, 5]);
    expect(wholeOf(drawn(2, 5), device, "event")).toEqual([2, 5]);
    expect(wholeOf(drawn(5, 5), device, "event")).toEqual([5, 6]);
  });
});
