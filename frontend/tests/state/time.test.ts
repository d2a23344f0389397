import { expect, it } from "vitest";
import { duration, exactTime, inTimeUnit, timeUnitFor } from "../../src/state/time";

it("durations take the largest unit that is at least one", () => {
  expect(duration(0)).toBe("0 ns");
  expect(duration(999)).toBe("999 ns");
  expect(duration(664_140)).toBe("664.14 µs");
  expect(duration(31_460_000)).toBe("31.46 ms");
  expect(duration(2_500_000_000)).toBe("2.50 s");
});

it("a time before the origin keeps its sign", () => expect(duration(-1500)).toBe("−1.50 µs"));

it("a table's times share one unit", () => {
  expect(inTimeUnit(500_000, timeUnitFor(3e6))).toBe("0.50");
  expect([1.12e9, 9.59e8].map((ns) => duration(ns, timeUnitFor(1.12e9, 9.59e8)))).toEqual(["1.12 s", "0.96 s"]);
  expect(exactTime(1234567)).toBe("1,234,567 ns");
});
