import { describe, expect, it } from "vitest";
import { overOf, stepsZoom, wholeOf, zoomOf, zoomPatch } from "../../src/state/over";

describe("charts over time or over events", () => {
  it("run over time where the address does not say events", () => {
    expect(overOf({ view: "timeline" })).toBe("time");
    expect(overOf({ view: "timeline", over: "event" })).toBe("event");
    expect(overOf({ view: "timeline", over: "constructor" })).toBe("time");
  });

  it("have a zoom of their own on each axis", () => {
    const route = { view: "timeline", t0: "10.4", t1: "20", e0: "3", e1: "9" } as const;
    expect(zoomOf(route, "time")).toEqual([10, 20]);
    expect(zoomOf(route, "event")).toEqual([3, 9]);
    expect(zoomPatch("event", [3, 9])).toEqual({ e0: "3", e1: "9" });
    expect(zoomPatch("time", null)).toEqual({ t0: undefined, t1: undefined });
  });

  it("have one over steps", () => {
    expect(stepsZoom({ view: "ranks", s0: "3", s1: "9" })).toEqual([3, 9]);
    expect(stepsZoom({ view: "ranks", s0: "3", s1: "1e999" })).toBeUndefined();
  });

  it("show everything where the address makes no sense", () => {
    for (const [t0, t1] of [["5", "5"], ["9", "1"], ["x", "3"], ["1", ""]] as const)
      expect(zoomOf({ view: "timeline", t0, t1 }, "time")).toBeUndefined();
    expect(zoomOf({ view: "timeline", t0: "5" }, "time")).toBeUndefined();
  });

  it("learn from the server which events there are", () => {
    expect(wholeOf("time", 100, 200, undefined)).toEqual([100, 200]);
    expect(wholeOf("event", 100, 200, undefined)).toBeUndefined();
    expect(wholeOf("event", 100, 200, { t0: 5, t1: 6, first_event: 4, last_event: 7 })).toEqual([4, 8]);
    expect(wholeOf("event", 100, 200, { t0: 5, t1: 9, first_event: -1, last_event: -1 })).toEqual([5, 9]);
  });
});
