import { describe, expect, it } from "vitest";
import { eventUnder, momentIn, placeOf } from "../../src/views/timeline/cursor";

describe("a moment on an axis", () => {
  it("stands at its time, or in the middle of its event", () => {
    expect(placeOf({ t: 1500, event: 7 }, "time")).toBe(1500);
    expect(placeOf({ t: 1500, event: 7 }, "event")).toBe(7.5);
    expect(placeOf({ t: 1500 }, "event")).toBeUndefined();
    expect(placeOf({ event: 7 }, "time")).toBeUndefined();
  });

  it("is found from its place, within the events that there are", () => {
    const whole = { first_event: 4, last_event: 9, peak: { event: 6 } };
    expect([3.2, 4, 7.99, 10].map((place) => eventUnder(place, whole))).toEqual([4, 4, 7, 9]);
    expect(eventUnder(7.5, { first_event: -1, last_event: -1, peak: { event: 6 } })).toBe(6);
  });

  it("is told by the address, if that holds numbers", () => {
    expect(momentIn({ t: "12.6", event: "3" })).toEqual({ t: 13, event: 3 });
    expect(momentIn({ t: "soon" })).toEqual({ t: undefined, event: undefined });
  });
});
