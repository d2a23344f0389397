import { describe, expect, it } from "vitest";
import type { CurveAnswer, LanesAnswer } from "../../src/api/types";
import { laneRows, lanesHeight, openStretch, spanAt } from "../../src/draw/lanes";
import { ceiling, columnAt, columnParts, columnStart, kept, layerTops, panned, reserveFits, turned, zoomed } from "../../src/draw/stack";

const curve: CurveAnswer = {
  t0: 100,
  t1: 140,
  px: 4,
  min: [1, 2, 3, 1],
  max: [3, 4, 9, 2],
  reserved: [10, 10, 12, 12],
  keys: ["parameter", "activation"],
  stacks: [
    [1, 1, 1, 1],
    [2, 3, 8, 1],
  ],
  peak: { time_ns: 121, bytes: 9, column: 2, event: 7 },
  exact: true,
};

it("a window moves by a share of its width and stays inside the whole", () => {
  expect(panned([100, 200], 0.1, [0, 1000])).toEqual([110, 210]);
  expect(panned([100, 200], -2, [0, 1000])).toEqual([0, 100]);
});

it("a reserve fits that is not three times as high as the rest", () => {
  expect(reserveFits([curve])).toBe(true);
  expect(reserveFits([{ ...curve, reserved: [40, 40, 40, 40] }])).toBe(false);
  expect(reserveFits([{ ...curve, reserved: null }])).toBe(true);
});

it("layers stand on each other and end at the column's total", () =>
  expect(layerTops(curve.stacks, 4)).toEqual([
    [1, 1, 1, 1],
    [3, 4, 9, 2],
  ]));

it("a column is found by its time", () => {
  expect([99, 100, 109, 110, 139, 140, 999].map((t) => columnAt(curve, t))).toEqual([0, 0, 0, 1, 3, 3, 3]);
  expect(columnStart(curve, 2)).toBe(120);
  expect(columnParts(curve, 2)).toEqual([
    { key: "parameter", bytes: 1 },
    { key: "activation", bytes: 8 },
  ]);
});

it("the picture holds the reserved line too", () => expect(ceiling([curve])).toBeCloseTo(13.44));

describe("a window", () => {
  it("zooms around the time under the pointer", () =>
    expect(zoomed([0, 1000], 250, 0.5, [0, 1000])).toEqual([125, 625]));
  it("never leaves the step", () => {
    expect(zoomed([0, 400], 0, 10, [0, 1000])).toEqual([0, 1000]);
    expect(kept([-50, 50], [0, 1000])).toEqual([0, 100]);
    expect(kept([980, 1080], [0, 1000])).toEqual([900, 1000]);
  });
  it("never gets narrower than the least", () => expect(zoomed([0, 1000], 500, 0.0001, [0, 1000])).toEqual([450, 550]));
});

it("turning the wheel zooms about a place, and moves along with Shift, whichever way the browser tells it", () => {
  expect(turned({ shiftKey: false, deltaX: 0, deltaY: -400 * Math.LN2 }, [0, 800], 200, [0, 1000])).toEqual([100, 500]);
  expect(turned({ shiftKey: true, deltaX: 80, deltaY: 0 }, [100, 300], 0, [0, 1000])).toEqual([120, 320]);
  expect(turned({ shiftKey: true, deltaX: 0, deltaY: -80 }, [100, 300], 0, [0, 1000])).toEqual([80, 280]);
});

describe("lanes", () => {
  const span = (start_ns: number, end_ns: number, name = "") => ({ start_ns, end_ns, name, phase: null });
  const answer: LanesAnswer = {
    t0: 0,
    t1: 100,
    steps: [span(0, 100)],
    phases: [],
    modules: [[span(10, 40, "a"), span(50, 90, "b")]],
    omitted: 0,
  };
  const lanes = laneRows(answer);
  it("without spans take no room", () =>
    expect(lanes.map((l) => [l.kind, l.top, l.height])).toEqual([
      ["step", 0, 18],
      ["module", 21, 17],
    ]));
  it("are as high as the last one's end", () => expect(lanesHeight(lanes)).toBe(38));
  it("name a span where no later one lies on it", () => {
    const within = [span(0, 100, "backward"), span(5, 40, "again"), span(60, 70, "again"), span(120, 130)];
    expect(openStretch(within, 0)).toEqual([70, 100]);
    expect(openStretch(within, 1)).toEqual([5, 40]);
    expect(openStretch([span(0, 10), span(0, 10)], 0)).toEqual([0, 0]);
  });
  it("know the span under a point", () => {
    expect(spanAt(lanes, 25, 60)?.span.name).toBe("b");
    expect(spanAt(lanes, 25, 45)).toBeNull();
    expect(spanAt(lanes, 99, 60)).toBeNull();
  });
});
