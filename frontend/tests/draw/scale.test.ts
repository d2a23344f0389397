import { expect, it } from "vitest";
import { linear, roundStep, tickDecimals, ticks } from "../../src/draw/scale";

it("a scale maps both ways", () => {
  const scale = linear([0, 100], [50, 250]);
  expect(scale(25)).toBe(100);
  expect(scale.invert(100)).toBe(25);
});

it("a scale over nothing stays at its start", () => {
  const scale = linear([5, 5], [0, 100]);
  expect(scale(5)).toBe(0);
  expect(scale.invert(40)).toBe(5);
});

it("steps are 1, 2 or 5 times a power of ten", () => {
  expect(roundStep(100, 5)).toBe(20);
  expect(roundStep(90, 4)).toBe(50);
  expect(roundStep(0.7, 7)).toBeCloseTo(0.1);
  expect(roundStep(0, 5)).toBe(1);
});

it("ticks are round in the axis's unit", () => {
  expect(ticks(0, 10 * 1024, 5, 1024)).toEqual([0, 2048, 4096, 6144, 8192, 10240]);
  expect(ticks(13, 47, 4)).toEqual([20, 30, 40]);
});

it("decimals tell neighboring ticks apart", () => {
  expect(tickDecimals(20)).toBe(0);
  expect(tickDecimals(0.5)).toBe(1);
  expect(tickDecimals(0.02)).toBe(2);
});
